"""Reduced draft vocabularies: the target tokens that a head drafts.

jspec stores ``draft_to_target``, the ascending target ids of the draft's ids. EAGLE-3 files store
offsets, ``d2t[j] = draft_to_target[j] - j``, and a mask of the target's vocabulary, ``t2d``.
"""

import numpy as np


def from_offsets(
    offsets: np.ndarray | None, mask: np.ndarray | None, size: int, target_size: int
) -> np.ndarray | None:
    """Return ``draft_to_target`` int32 [size] from ``d2t`` and ``t2d``; None for equal ids."""
    if offsets is None:
        if size == target_size:
            return None
        raise ValueError(
            f"draft_vocab_size is {size} and the target's vocabulary {target_size}, but the file "
            "has no d2t that names those tokens; export the head with d2t and t2d"
        )
    if offsets.shape != (size,) or not np.issubdtype(offsets.dtype, np.integer):
        raise ValueError(f"d2t is {offsets.dtype}{list(offsets.shape)}, not whole numbers [{size}]")
    ids = offsets.astype(np.int64) + np.arange(size)
    _check(ids, target_size, "d2t: id j of the draft is id j + d2t[j] of the target, and these")
    if mask is not None:
        _check_mask(ids, mask, target_size)
    return None if size == target_size else ids.astype(np.int32)


def from_ids(ids: np.ndarray, size: int, target_size: int) -> tuple[np.ndarray | None, np.ndarray]:
    """Return ``draft_to_target`` and the order [size] from unordered ids (vLLM's ``token_map``).

    Row ``order[j]`` of the file's output matrices belongs to id j of the draft.
    """
    if ids.shape != (size,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_map is {ids.dtype}{list(ids.shape)}, not whole numbers [{size}]")
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids.astype(np.int64)[order]
    _check(sorted_ids, target_size, "token_map: sorted, its ids")
    return (None if size == target_size else sorted_ids.astype(np.int32)), order


def to_offsets(draft_to_target: np.ndarray, target_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``d2t`` int64 [Vd] and ``t2d`` bool [V]."""
    ids, mask = np.asarray(draft_to_target).astype(np.int64), np.zeros(target_size, bool)
    mask[ids] = True
    return ids - np.arange(ids.size), mask


def _check(ids: np.ndarray, target_size: int, what: str) -> None:
    # Compare, because differences of ids near the ends of int64 overflow.
    inside = ids.size == 0 or (ids.min() >= 0 and ids.max() < target_size)
    if not inside or np.any(ids[1:] <= ids[:-1]):
        raise ValueError(
            f"{what} must increase and lie in [0, {target_size}); got {ids[0]}, …, {ids[-1]}. "
            "The file belongs to another target, or is damaged"
        )


def _check_mask(ids: np.ndarray, mask: np.ndarray, target_size: int) -> None:
    if mask.shape != (target_size,) or not mask[ids].all() or np.count_nonzero(mask) != ids.size:
        raise ValueError(
            f"t2d {mask.dtype}{list(mask.shape)} is not the mask of the {ids.size} ids that d2t "
            f"names among {target_size}; export the head again"
        )
