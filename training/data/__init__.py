"""Training data: files in, batches of packed tokens out.

``sources`` cleans source trees, ``readers`` reads everything else, ``records`` says what a line may
hold, ``chat`` what of a conversation is learned. ``encode`` and ``token_file`` tokenise it once,
``packing`` makes windows of it, ``loader`` shuffles them into batches; ``settings`` is all of that
behind options of a command line. ``corpus`` is what pre-training sees instead: a tokenizer of its
own, and windows without segments. ``prompts`` are what ``generate_data`` asks.
"""

from training.data.corpus import Corpus, Windows, open_corpus, prepare
from training.data.loader import batches, held_out
from training.data.packing import token_counts
from training.data.settings import Data, DataSettings, open_data
from training.data.sources import Document, find_documents

__all__ = [
    "Corpus",
    "Data",
    "DataSettings",
    "Document",
    "Windows",
    "batches",
    "find_documents",
    "held_out",
    "open_corpus",
    "open_data",
    "prepare",
    "token_counts",
]
