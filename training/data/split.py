"""The held-out split: no prompt is on both sides."""

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components


def is_held_out(groups: np.ndarray, share: float) -> np.ndarray:
    """Return bool [documents]: a ``share`` of the documents, the same ones in every run.

    ``groups`` uint64 [documents, 2] are two hashes of each document. Documents that share a hash,
    directly or by way of others, are on the same side.
    """
    return linked(groups).astype(np.float64) / 2.0**64 < share


def are_linked(groups: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return bool [documents]: those that must not be on another side than ``others``.

    Both are hashes as in ``is_held_out``.
    """
    names = linked(np.concatenate([groups, others]))
    return np.isin(names[: len(groups)], names[len(groups) :])


def linked(groups: np.ndarray) -> np.ndarray:
    """Return uint64 [documents]: a number that linked documents share, evenly distributed."""
    hashes, nodes = np.unique(groups, return_inverse=True)
    nodes = nodes.reshape(groups.shape)
    edges = (np.ones(len(nodes), bool), (nodes[:, 0], nodes[:, 1]))
    graph = coo_array(edges, shape=(len(hashes), len(hashes)))
    count, labels = connected_components(graph, directed=False)
    names = np.zeros(count, np.uint64)
    np.bitwise_xor.at(names, labels, hashes)
    return names[labels[nodes[:, 0]]]


def split_facts(train: np.ndarray, held_out: np.ndarray, left_out: int) -> dict[str, int]:
    """Return the record of a split, given the hashes of both sides as in ``is_held_out``.

    ``left_out`` documents of the data share a prompt with other data that is held out.
    """
    sides = [np.unique(groups[:, 1]) for groups in (train, held_out)]
    return {
        "train_prompts": len(sides[0]),
        "held_out_prompts": len(sides[1]),
        "prompts_on_both_sides": len(np.intersect1d(*sides)),
        "documents_left_out_of_training": left_out,
    }
