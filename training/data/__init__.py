"""Training data: from files to batches of packed tokens.

``sources`` cleans source trees, ``readers`` reads other files, ``records`` defines lines of JSON,
``chat`` renders conversations. ``encode`` and ``token_file`` tokenise once, ``packing`` makes
windows, ``loader`` shuffles them into batches, ``settings`` are the options. ``corpus`` prepares
the data of ``pretrain``, ``prompts`` those of ``generate_data``.
"""

from training.data.corpus import Corpus, Windows, open_corpus, prepare
from training.data.loader import batches, held_out
from training.data.sources import find_documents

__all__ = [
    "Corpus",
    "Windows",
    "batches",
    "find_documents",
    "held_out",
    "open_corpus",
    "prepare",
]
