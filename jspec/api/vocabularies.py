"""Token-level intersection of two vocabularies (TLI, arXiv 2502.05202, section 4).

A draft model with another tokenizer drafts the tokens that the target has too. Two tokens are the
same if their spellings are, after each vocabulary's sign for a space ("Ġ" or "▁") is replaced;
special tokens of the same name are the same. Of several tokens with one spelling, the lowest id
counts.

The mapping depends on the two vocabularies alone. It is cached in the user's cache directory under
a digest of both, and checked when it is read: a damaged file is written again.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from jspec.checkpoints import safetensors_files
from jspec.drafters.draft_model.language_model import TranslatingParams, translating
from jspec.models.decoder import DecoderParams
from jspec.util import atomic_files

LEAST_SHARED = 0.05  # of the smaller vocabulary; below it, drafts are hardly ever accepted
_SPACES = ("Ġ", "▁")  # of byte-level BPE, and of SentencePiece
_VERSION = "1"  # of rule and file format: part of the digest


@dataclasses.dataclass(frozen=True, eq=False)
class SharedVocabulary:
    """The tokens that a target and a draft model share.

    Attributes:
      target_ids: int32 [M], ascending.
      draft_ids: int32 [M], the draft model's ids of the same tokens.
      unknown: the draft model's id for the target's other tokens.
    """

    target_ids: np.ndarray
    draft_ids: np.ndarray
    unknown: int

    def translating(self, params: DecoderParams, target_size: int) -> TranslatingParams:
        """Return the draft model's weights mapped from and to the target's vocabulary [V]."""
        ids = np.full(target_size, self.unknown, np.int32)
        ids[self.target_ids] = self.draft_ids
        return translating(params, self.target_ids, self.draft_ids, ids)


def are_same(target_tokenizer: Any, draft_tokenizer: Any) -> bool:
    """Return whether both tokenizers are known and have the same ids for the same tokens."""
    both = target_tokenizer, draft_tokenizer
    return None not in both and both[0].get_vocab() == both[1].get_vocab()


def check_same(
    target_size: int, draft_size: int, target_tokenizer: Any = None, draft_tokenizer: Any = None
) -> None:
    """Check that every token id is the same token of target and draft model.

    If both tokenizers are known, they must agree on every id that both have. The vocabulary sizes
    may then differ, since they are padded.

    Raises:
      ValueError: they do not share a vocabulary.
    """
    hint = ""
    if target_tokenizer is None or draft_tokenizer is None:
        if target_size == draft_size:
            return
    else:
        target = {index: token for token, index in target_tokenizer.get_vocab().items()}
        draft = {index: token for token, index in draft_tokenizer.get_vocab().items()}
        differing = min((i for i in target.keys() & draft if target[i] != draft[i]), default=None)
        if differing is None and target and draft:
            return
        if differing is not None:
            hint = (
                f" Their tokenizers differ first at id {differing}: "
                f"{target[differing]!r} and {draft[differing]!r}."
            )
    raise ValueError(
        "Target and draft model should have the same vocabulary size. Target model "
        f"vocab_size={target_size}. Draft model vocab_size={draft_size}. Using models with "
        "different tokenizers can cause out-of-bounds errors during speculative decoding." + hint
    )


def share(
    target_tokenizer: Any,
    draft_tokenizer: Any,
    target_size: int,
    draft_size: int,
    cache: str | os.PathLike | None = None,
) -> SharedVocabulary:
    """Return the tokens that both vocabularies have.

    Args:
      target_tokenizer: of ``transformers``, or None if the model has none.
      draft_tokenizer: the same; its unknown token, or else its end of text, stands for tokens that
        the draft model lacks.
      target_size: V, the target's ids; tokens past them are ignored.
      draft_size: the draft model's ids.
      cache: directory of cached mappings; None for the user's cache directory.

    Raises:
      ValueError: a tokenizer is missing; the draft model's has neither an unknown token nor an end
        of text; the two share less than ``LEAST_SHARED`` of the smaller vocabulary.
    """
    for name, tokenizer in (("target", target_tokenizer), ("draft model", draft_tokenizer)):
        if tokenizer is None:
            raise ValueError(
                f"use_heterogeneous_vocab compares tokenizers, but the {name} has none; put the "
                "tokenizer's files beside its weights."
            )
    target = _within(target_tokenizer.get_vocab(), target_size)
    draft = _within(draft_tokenizer.get_vocab(), draft_size)
    candidates = (draft_tokenizer.unk_token_id, draft_tokenizer.eos_token_id)
    fits = (token for token in candidates if token is not None and 0 <= token < draft_size)
    unknown = next(fits, None)
    if unknown is None:
        raise ValueError(
            "use_heterogeneous_vocab: the draft model's tokenizer has neither an unk_token nor an "
            "eos_token to stand for tokens that it lacks; set one in its tokenizer_config.json."
        )
    target_ids, draft_ids = _cached_intersection(target, draft, cache)
    least = max(1, int(np.ceil(LEAST_SHARED * min(len(target), len(draft)))))
    if target_ids.size < least:
        raise ValueError(
            f"use_heterogeneous_vocab: the vocabularies share {target_ids.size} tokens, of the "
            f"target's {len(target)} and the draft model's {len(draft)}; at least {least} are "
            "needed for drafts to be worth their cost. Use another draft model, or a method "
            "without one, such as 'ngram'."
        )
    return SharedVocabulary(target_ids, draft_ids, unknown)


def intersection(target: dict[str, int], draft: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of common tokens: int32 [M] of the target, ascending, and [M] of the draft.

    >>> intersection({"Ġthe": 0, "cat": 1, "s": 2}, {"s": 0, "dog": 1, "▁the": 2})
    (array([0, 2], dtype=int32), array([2, 0], dtype=int32))
    """
    ours, theirs = _spelled(target), _spelled(draft)
    pairs = sorted((ours[token], theirs[token]) for token in ours.keys() & theirs)
    ids = np.array(pairs, np.int32).reshape(-1, 2)
    return np.ascontiguousarray(ids[:, 0]), np.ascontiguousarray(ids[:, 1])


def _within(vocabulary: dict[str, int], size: int) -> dict[str, int]:
    """Return the tokens that the model has rows for."""
    return {token: index for token, index in vocabulary.items() if 0 <= index < size}


def _spelled(vocabulary: dict[str, int]) -> dict[str, int]:
    """Return the lowest id of each spelling, with plain spaces.

    The vocabulary's sign for a space is the more frequent first character of the two; the other
    one is a letter there.
    """
    starts = Counter(token[:1] for token in vocabulary)
    sign = max(_SPACES, key=lambda each: starts[each])
    ids: dict[str, int] = {}
    for token, index in sorted(vocabulary.items(), key=lambda item: item[1]):
        ids.setdefault(token.replace(sign, " "), index)
    return ids


def _cached_intersection(
    target: dict[str, int], draft: dict[str, int], cache: str | os.PathLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the intersection, from the cache if it is there and intact."""
    folder = platformdirs.user_cache_path("jspec") / "vocabularies" if cache is None else cache
    path = Path(folder) / f"{_digest(target, draft)}.safetensors"
    ids = _read(path, target, draft)
    if ids is None:
        ids = intersection(target, draft)
        with contextlib.suppress(OSError):  # works without a cache
            _write(path, *ids)
    return ids


def _digest(*vocabularies: dict[str, int]) -> str:
    """Hash the two vocabularies, ids included."""
    digest = hashlib.sha256(_VERSION.encode())
    for vocabulary in vocabularies:
        digest.update(f"\0{len(vocabulary)}\0".encode())
        for token, index in sorted(vocabulary.items(), key=lambda item: item[1]):
            text = token.encode("utf-8", "surrogatepass")
            digest.update(f"{index} {len(text)} ".encode() + text)
    return digest.hexdigest()


def _read(
    path: Path, target: dict[str, int], draft: dict[str, int]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the ids that ``_write`` wrote; None if the file is missing or damaged."""
    try:
        tensors = safetensors_files.read(path)
    except (ValueError, OSError):
        return None
    if tensors.keys() != {"target_ids", "draft_ids", "checksum"}:
        return None
    ids = tensors["target_ids"], tensors["draft_ids"]
    if any(each.dtype != np.int32 or each.ndim != 1 for each in ids) or ids[0].size != ids[1].size:
        return None
    if not np.array_equal(tensors["checksum"], _checksum(*ids)):
        return None
    known = zip(ids, (target, draft), strict=True)
    in_range = all(np.isin(each, list(names.values())).all() for each, names in known)
    if not in_range or not (np.diff(ids[0]) > 0).all():
        return None
    return np.array(ids[0]), np.array(ids[1])  # copies, since the mapped file may go away


def _write(path: Path, target_ids: np.ndarray, draft_ids: np.ndarray) -> None:
    """Write the file whole or not at all, so that no reader sees a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "target_ids": target_ids,
        "draft_ids": draft_ids,
        "checksum": _checksum(target_ids, draft_ids),
    }
    layout = [(name, array.shape, array.dtype) for name, array in tensors.items()]
    with atomic_files.aside(path) as partial:
        safetensors_files.write(partial, layout, iter(tensors.values()))


def _checksum(*ids: np.ndarray) -> np.ndarray:
    """Return the SHA-256 of the ids: uint8 [32]."""
    digest = hashlib.sha256(b"".join(each.tobytes() for each in ids)).digest()
    return np.frombuffer(digest, np.uint8)
