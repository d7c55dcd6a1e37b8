"""Reasoning of Qwen3: ``<think>...</think>``, which ``enable_thinking: false`` leaves out."""

from collections.abc import Mapping
from typing import Any

from jspec.server.readers.reasoning import ReasoningReader


class Qwen3(ReasoningReader):
    """Reads reasoning; a call of a tool ends it too."""

    implied_ends = ("<tool_call>",)

    @classmethod
    def begins_after(cls, prompt: str, variables: Mapping[str, Any]) -> bool:
        """Return whether the text begins with reasoning; not if it was switched off."""
        is_on = variables.get("enable_thinking") is not False
        return is_on and super().begins_after(prompt, variables)
