"""Training data: from files to batches of packed tokens.

``sources`` cleans source trees, ``readers`` and ``files`` read other data, ``records`` and
``messages`` define lines of JSON, ``chat`` renders conversations. ``encode`` and ``token_file``
tokenise once, ``split`` holds data out, ``packing`` makes windows, ``loader`` shuffles them into
batches, each a ``Batch`` of ``batch``; ``settings`` are the options. ``ledger``, ``coverage`` and
``report`` account for every record. ``corpus`` prepares the data of ``pretrain``, ``prompts`` those
of ``generate_data``.
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
