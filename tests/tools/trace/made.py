"""Hand-made traces for tests of pages, without a model."""

from jspec.api.metrics import Counts
from jspec.tools.trace import Node, Piece, Round, Trace, names


def node(index, parent, depth, label, fate, **changes):
    fields = {"p": 0.25, "q": 0.5, "chance": 0.5, "uniform": 0.125, "draw": None} | changes
    likeliest = ((7, label, 0.5), (8, "b", 0.25), (9, "c", 0.125))
    return Node(index, parent, depth, 7, label, fate, likeliest=likeliest, **fields)


def trace(token="a", text=" a", prompt="once"):
    """Return three rounds: refused in a tree, accepted to a leaf, nothing drafted.

    ``token`` is the text of every token.
    """
    label = names.spaced(token)
    root = node(0, -1, 0, label, "accepted", p=None, q=None, chance=None, uniform=None)
    piece = lambda source, index=None: Piece(7, label, text, source, 0.25, index)
    tree = (
        root,
        node(1, 0, 1, label, "refused", uniform=0.75),
        node(2, 0, 1, label, "accepted"),
        node(3, 1, 2, label, "not reached", chance=None),
        node(4, 2, 2, label, "refused", uniform=0.875),
    )
    words = f"refused “{label}”"
    rounds = (
        Round(0, 3, tree, (piece("drafted", 2), piece("corrected")), "refused", words),
        Round(
            1,
            5,
            (root, node(1, 0, 1, label, "accepted", q=None, chance=None, uniform=None)),
            (piece("drafted", 1), piece("bonus")),
            "leaf",
            words,
        ),
        Round(2, 7, (root,), (piece("plain"),), "no draft", words),
    )
    setting = {"model": token, "drafter": "Eagle", "rule": "rejection", "temperature": "0.8"}
    counts = Counts((0, 2, 0), 5, 3, 5)
    return Trace(prompt, (1, 2, 3, 4), rounds, "length", None, counts, setting)
