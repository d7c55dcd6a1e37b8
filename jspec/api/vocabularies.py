"""What two tokenizers have in common: token-level intersection (TLI, arXiv 2502.05202, section 4).

A draft model with a tokenizer of its own drafts tokens that the target has too. Two tokens are the
same where they are spelled alike, once the sign that each vocabulary writes for a space ("Ġ" or
"▁") is read as one; special tokens of the same name are the same. Where several tokens of a
vocabulary come to one spelling, that of the lowest id counts.

The mapping follows from the two vocabularies alone. It is kept in the user's cache directory under
a digest of both, and checked when it is read: a file that is damaged is made again.
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

LEAST_SHARED = 0.05  # of the smaller vocabulary; below it, drafts would hardly ever be right
_SPACES = ("Ġ", "▁")  # of byte-level BPE, and of SentencePiece
_VERSION = "1"  # of the rule and the file: part of the digest


@dataclasses.dataclass(frozen=True, eq=False)
class SharedVocabulary:
    """The tokens that a target and a draft model share.

    Attributes:
      target_ids: int32 [M], ascending.
      draft_ids: int32 [M], the draft model's ids of the same tokens.
      unknown: the draft model's id for all other tokens of the target.
    """

    target_ids: np.ndarray
    draft_ids: np.ndarray
    unknown: int

    def translating(self, params: DecoderParams, target_size: int) -> TranslatingParams:
        """The draft model's weights with its way to the target's vocabulary [V] and back."""
        ids = np.full(target_size, self.unknown, np.int32)
        ids[self.target_ids] = self.draft_ids
        return translating(params, self.target_ids, self.draft_ids, ids)


def are_same(target_tokenizer: Any, draft_tokenizer: Any) -> bool:
    """Whether both tokenizers are known and have the same ids for the same tokens."""
    both = target_tokenizer, draft_tokenizer
    return None not in both and both[0].get_vocab() == both[1].get_vocab()


def check_same(
    target_size: int, draft_size: int, target_tokenizer: Any = None, draft_tokenizer: Any = None
) -> None:
    """Checks that target and draft model mean the same by every token id.

    Tokenizers decide where both are known: they must agree on every id that both have. The models'
    sizes may then differ, being padded.

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
    """The tokens that both models know, found once for each pair of vocabularies.

    Args:
      target_tokenizer: of ``transformers``, or None where the model has none.
      draft_tokenizer: the same; its unknown token, or else its end of text, stands for what the
        draft model does not know.
      target_size: V, the target's ids; tokens past them are left out.
      draft_size: the draft model's ids.
      cache: directory to keep the mapping in; None for the user's cache directory.

    Raises:
      ValueError: a tokenizer is missing, the draft model's has neither an unknown token nor an end
        of text, or the two share less than ``LEAST_SHARED`` of the smaller vocabulary.
    """
    for name, tokenizer in (("target", target_tokenizer), ("draft model", draft_tokenizer)):
        if tokenizer is None:
            raise ValueError(
                f"use_heterogeneous_vocab compares tokenizers, but the {name} has none; put the "
                "tokenizer's files beside its weights."
            )
    target = _within(target_tokenizer.get_vocab(), target_size)
    draft = _within(draft_tokenizer.get_vocab(), draft_size)
    unknown = next(
        (
            each
            for each in (draft_tokenizer.unk_token_id, draft_tokenizer.eos_token_id)
            if each is not None and 0 <= each < draft_size
        ),
        None,
    )
    if unknown is None:
        raise ValueError(
            "use_heterogeneous_vocab: the draft model's tokenizer has neither an unk_token nor an "
            "eos_token to stand for tokens that it lacks; set one in its tokenizer_config.json."
        )
    target_ids, draft_ids = _kept(target, draft, cache)
    smaller = min(len(target), len(draft))
    if target_ids.size < max(1, LEAST_SHARED * smaller):
        raise ValueError(
            f"use_heterogeneous_vocab: the vocabularies share {target_ids.size} tokens, of the "
            f"target's {len(target)} and the draft model's {len(draft)}; at least "
            f"{max(1, int(np.ceil(LEAST_SHARED * smaller)))} are needed for drafts to be worth "
            "their cost. Use another draft model, or a method without one, such as 'ngram'."
        )
    return SharedVocabulary(target_ids, draft_ids, unknown)


def intersection(target: dict[str, int], draft: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the same tokens in both vocabularies: int32 [M] of the target, ascending, and [M].

    >>> intersection({"Ġthe": 0, "cat": 1, "s": 2}, {"s": 0, "dog": 1, "▁the": 2})
    (array([0, 2], dtype=int32), array([2, 0], dtype=int32))
    """
    ours, theirs = _spelled(target), _spelled(draft)
    pairs = sorted((ours[token], theirs[token]) for token in ours.keys() & theirs)
    found = np.array(pairs, np.int32).reshape(-1, 2)
    return np.ascontiguousarray(found[:, 0]), np.ascontiguousarray(found[:, 1])


def _within(vocabulary: dict[str, int], size: int) -> dict[str, int]:
    """The tokens that the model has rows for."""
    return {token: index for token, index in vocabulary.items() if 0 <= index < size}


def _spelled(vocabulary: dict[str, int]) -> dict[str, int]:
    """Lowest ids by spelling, spaces written as such.

    A vocabulary has one sign for a space, by far the most frequent first character of the two; the
    other is a letter there.
    """
    starts = Counter(token[:1] for token in vocabulary)
    sign = max(_SPACES, key=lambda each: starts[each])
    found: dict[str, int] = {}
    for token, index in sorted(vocabulary.items(), key=lambda item: item[1]):
        found.setdefault(token.replace(sign, " "), index)
    return found


def _kept(
    target: dict[str, int], draft: dict[str, int], cache: str | os.PathLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """The intersection, from the cache where it is there and whole."""
    folder = platformdirs.user_cache_path("jspec") / "vocabularies" if cache is None else cache
    path = Path(folder) / f"{_digest(target, draft)}.safetensors"
    found = _read(path, target, draft)
    if found is None:
        found = intersection(target, draft)
        with contextlib.suppress(OSError):  # a cache that cannot be written is done without
            _write(path, *found)
    return found


def _digest(*vocabularies: dict[str, int]) -> str:
    """Says which two vocabularies these are, ids included."""
    whole = hashlib.sha256(_VERSION.encode())
    for vocabulary in vocabularies:
        whole.update(f"\0{len(vocabulary)}\0".encode())
        for token, index in sorted(vocabulary.items(), key=lambda item: item[1]):
            text = token.encode("utf-8", "surrogatepass")
            whole.update(f"{index} {len(text)} ".encode() + text)
    return whole.hexdigest()


def _read(
    path: Path, target: dict[str, int], draft: dict[str, int]
) -> tuple[np.ndarray, np.ndarray] | None:
    """What ``_write`` wrote; None where there is no such file or it is not whole."""
    try:
        tensors = safetensors_files.read(path)
    except (ValueError, OSError):
        return None
    if tensors.keys() != {"target_ids", "draft_ids", "checksum"}:
        return None
    ids = tensors["target_ids"], tensors["draft_ids"]
    if any(each.dtype != np.int32 or each.ndim != 1 for each in ids) or ids[0].size != ids[1].size:
        return None
    known = (
        np.isin(ids[0], list(target.values())).all() and np.isin(ids[1], list(draft.values())).all()
    )
    whole = np.array_equal(tensors["checksum"], _checksum(*ids))
    ascending = (np.diff(ids[0]) > 0).all()
    # Copies: the mapped file may go away.
    return tuple(np.array(each) for each in ids) if known and whole and ascending else None


def _write(path: Path, target_ids: np.ndarray, draft_ids: np.ndarray) -> None:
    """Writes the file whole or not at all, so that no reader sees a part."""
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
    """SHA-256 of the ids: uint8 [32]."""
    return np.frombuffer(
        hashlib.sha256(b"".join(each.tobytes() for each in ids)).digest(), np.uint8
    )
