"""Training data: files in, batches of packed tokens out.

``sources`` finds documents, ``corpus`` makes what pre-training sees, ``loader`` shuffles rows into
batches.
"""

from training.data.corpus import Corpus, Windows, cut, open_corpus, prepare
from training.data.loader import batches, held_out
from training.data.sources import Document, find_documents

__all__ = [
    "Corpus", "Document", "Windows", "batches", "cut", "find_documents", "held_out", "open_corpus",
    "prepare",
]  # fmt: skip
