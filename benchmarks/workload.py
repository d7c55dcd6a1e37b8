"""Cases and prompts of the benchmarks."""

import dataclasses
import hashlib
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

METHODS = ("autoregressive", "ngram", "draft_model")
# Modules of the standard library that the demo models are not trained on (see their provenance).
HELD_OUT = (
    "argparse",
    "json.decoder",
    "heapq",
    "statistics",
    "http.client",
    "logging",
    "tarfile",
    "textwrap",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
      method: one of ``METHODS``.
      batch: rows decoded together.
      temperature: 0 is greedy.
      dtype: of the weights, ours and theirs.
      num_speculative_tokens: K, 0 without speculation.
      ngram_max: longest n-gram to look up; the shortest is 1.
    """

    method: str
    batch: int
    temperature: float
    dtype: str
    num_speculative_tokens: int
    ngram_max: int = 3

    @property
    def peer_modes(self) -> tuple[str, ...]:
        """The comparable modes of the peer, which speculates at batch 1 only."""
        if self.batch > 1 or self.method == "autoregressive":
            return ("eager", "compiled")
        return {"ngram": ("prompt_lookup",), "draft_model": ("assisted",)}[self.method]


def cases(
    methods: Sequence[str],
    batches: Sequence[int],
    temperatures: Sequence[float],
    dtypes: Sequence[str],
    num_speculative_tokens: int,
    ngram_max: int,
) -> Iterator[Case]:
    """Yield all combinations, ordered so that cases of one peer process are adjacent."""
    for dtype, batch, temperature, method in itertools.product(
        dtypes, batches, temperatures, methods
    ):
        num = 0 if method == "autoregressive" else num_speculative_tokens
        yield Case(method, batch, temperature, dtype, num, ngram_max)


def source_prompts(tokenizer, count: int, length: int) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` token ids from the middle of held-out source files.

    They have one length, so that neither side pads a batch.
    """
    prompts = []
    for index in range(count):
        spec = importlib.util.find_spec(HELD_OUT[index % len(HELD_OUT)])
        text = Path(spec.origin).read_text()
        lines = text.splitlines(keepends=True)
        skip = (1 + index // len(HELD_OUT)) * len(lines) // 4
        ids = tokenizer.encode("".join(lines[skip:])[: 40 * length], add_special_tokens=False)
        if len(ids) < length:
            raise ValueError(f"{spec.name} is too short for prompts of {length} tokens")
        prompts.append(list(ids[:length]))
    return prompts


def edits(tokenizer, count: int, prompt: int, answer: int) -> list[tuple[list[int], list[int]]]:
    """Return pieces of held-out source, and their ``edited`` versions, as token ids."""
    rng = np.random.default_rng(0)
    pairs = []
    for index, piece in enumerate(source_prompts(tokenizer, count, prompt)):
        text = edited(tokenizer.decode(piece), rng, index)
        pairs.append((piece, list(tokenizer.encode(text, add_special_tokens=False))[:answer]))
    return pairs


def edited(text: str, rng: np.random.Generator, index: int) -> str:
    """Return source with two names changed, a line dropped and a line doubled."""
    words = sorted({word for word in text.replace("(", " ").split() if word.isidentifier()})
    for word in rng.choice(words, 2):
        text = text.replace(word, f"{word}_{index}")
    lines = text.splitlines(keepends=True)
    drop, double = rng.integers(0, len(lines), 2)
    lines[double] *= 2
    return "".join(lines[:drop] + lines[drop + 1 :])


def random_prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Return token ids for models without a tokenizer, in which some n-grams occur twice."""
    draws = np.random.default_rng(0).integers(2, vocab_size, (count, length))
    half = length // 2
    draws[:, -half:] = draws[:, :half]
    return draws.tolist()


def fingerprint(prompts: list[list[int]]) -> str:
    """Return a short hash of the prompts, to compare runs."""
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
