"""Reasoning of DeepSeek-R1: the text up to ``</think>``; the chat template has begun it."""

from jspec.server.readers.reasoning import ReasoningReader


class DeepSeekR1(ReasoningReader):
    """Reads reasoning with or without the mark that begins it."""
