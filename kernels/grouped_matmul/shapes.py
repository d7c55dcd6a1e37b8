"""Shapes of the experts of real models, for tests and ahead-of-time compilation."""

from typing import NamedTuple


class Case(NamedTuple):
    """A matrix for each expert, and the rows of all tokens of a pass."""

    experts: int
    depth: int
    columns: int
    rows: int


CASES = {
    "Qwen3-30B-A3B, 5 tokens": Case(128, 2048, 2 * 768, 8 * 5),
    "Qwen3-30B-A3B, 40 tokens": Case(128, 2048, 2 * 768, 8 * 40),
    "Qwen3-30B-A3B, 160 tokens": Case(128, 2048, 2 * 768, 8 * 160),
    "Qwen3-30B-A3B, back": Case(128, 768, 2048, 8 * 40),
    "Mixtral-8x7B, 512 tokens": Case(8, 4096, 2 * 14336, 2 * 512),
    "DeepSeek-V3 on 8 devices, back": Case(256, 256, 7168, 8 * 40),
    "gpt-oss-20b": Case(32, 2880, 2 * 2880, 4 * 40),
}
