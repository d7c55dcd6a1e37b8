"""Cases of drafted chains."""

import numpy as np

from jspec.core import trees
from jspec.tools.certify.conditionals import processed
from jspec.tools.certify.drawing import Case


def chain(target, recorded, *, drawn=None, sampling=None, drawn_sampling=None, keep=None):
    """A chain whose drafts may differ from their record.

    ``drawn`` are the logits that it is drawn from, under ``drawn_sampling``; ``keep`` maps drafted
    tokens [T, K] to the valid ones.
    """

    def altered(draft):
        valid = np.pad(keep(draft.tokens[:, 1:]), ((0, 0), (1, 0)), constant_values=True)
        return draft.replace(valid=valid, tokens=np.where(valid, draft.tokens, 0))

    return Case(
        tuple(trees.chain(len(recorded)).tolist()),
        "chain",
        processed(target, sampling),
        processed(drawn or recorded, drawn_sampling or sampling),
        recorded=processed(recorded, sampling),
        altered=altered if keep else None,
        static=True,
    )
