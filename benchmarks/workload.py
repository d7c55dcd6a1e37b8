"""Prompts of the benchmarks, from sources that no model was trained on."""

import importlib.util
from pathlib import Path

import numpy as np

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
