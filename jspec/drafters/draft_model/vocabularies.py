"""Token-level intersection of two vocabularies (TLI, arXiv 2502.05202, section 4).

A draft model with another tokenizer drafts the tokens that the target has too. Two tokens are the
same if their spellings are, after each vocabulary's sign for a space ("Ġ" or "▁") is replaced;
special tokens of the same name are the same. Of several tokens with one spelling, the lowest id
counts.
"""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from jspec.drafters.draft_model.language_model import TranslatingParams, translating
from jspec.models.decoder import DecoderParams

LEAST_SHARED = 0.05  # share of the smaller vocabulary below which drafts are hardly ever accepted
_SPACES = ("Ġ", "▁")  # byte-level BPE's and SentencePiece's


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
    """Return whether both tokenizers are given and have the same ids for the same tokens."""
    both = target_tokenizer, draft_tokenizer
    return None not in both and both[0].get_vocab() == both[1].get_vocab()


def check_same(
    target_size: int, draft_size: int, target_tokenizer: Any = None, draft_tokenizer: Any = None
) -> None:
    """Check that every token id is the same token of target and draft model.

    If both tokenizers are given, they must agree on every id that both have. The vocabulary sizes
    may then differ, since they are padded.

    Raises:
      ValueError: they do not share a vocabulary.
    """
    hint, tokenizers = "", (target_tokenizer, draft_tokenizer)
    if None in tokenizers:
        if target_size == draft_size:
            return
    else:
        target, draft = ({i: token for token, i in t.get_vocab().items()} for t in tokenizers)
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
    target_tokenizer: Any, draft_tokenizer: Any, target_size: int, draft_size: int
) -> SharedVocabulary:
    """Return the tokens that both vocabularies have.

    The draft tokenizer's unknown token, or else its end of text, stands for tokens that the draft
    model lacks. Tokens past the sizes V are ignored.

    Raises:
      ValueError: a tokenizer is missing (None), the draft model's has neither of these tokens, or
        the two share less than ``LEAST_SHARED`` of the smaller vocabulary.
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
    unknown = next((i for i in candidates if i is not None and 0 <= i < draft_size), None)
    if unknown is None:
        raise ValueError(
            "use_heterogeneous_vocab: the draft model's tokenizer has neither an unk_token nor an "
            "eos_token to stand for tokens that it lacks; set one in its tokenizer_config.json."
        )
    target_ids, draft_ids = intersection(target, draft)
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

    The more frequent first character of ``_SPACES`` is the sign for a space; the other is a letter.
    """
    starts = Counter(token[:1] for token in vocabulary)
    sign = max(_SPACES, key=lambda each: starts[each])
    ids: dict[str, int] = {}
    for token, index in sorted(vocabulary.items(), key=lambda item: item[1]):
        ids.setdefault(token.replace(sign, " "), index)
    return ids
