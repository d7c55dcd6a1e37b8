"""Readers of growing texts: calls of tools and reasoning, one file a form, by vLLM's names."""

from jspec.server.readers.calls import CallReader
from jspec.server.readers.deepseek_r1 import DeepSeekR1
from jspec.server.readers.deepseek_v3 import DeepSeekV3
from jspec.server.readers.hermes import Hermes
from jspec.server.readers.llama3_json import Llama3Json
from jspec.server.readers.mistral import Mistral
from jspec.server.readers.pythonic import Pythonic
from jspec.server.readers.qwen3 import Qwen3
from jspec.server.readers.qwen3_coder import Qwen3Coder
from jspec.server.readers.reasoning import ReasoningReader

# For --tool-call-parser. A form whose tags are part of those of another one comes after it.
CALLS: dict[str, type[CallReader]] = {
    "qwen3_coder": Qwen3Coder,
    "deepseek_v3": DeepSeekV3,
    "mistral": Mistral,
    "hermes": Hermes,
    "pythonic": Pythonic,
    "llama3_json": Llama3Json,
}
# For --reasoning-parser.
REASONING: dict[str, type[ReasoningReader]] = {"deepseek_r1": DeepSeekR1, "qwen3": Qwen3}


def of_template(chat_template: str | None) -> str | None:
    """Return the name of the form of calls that a chat template shows; None if unknown."""
    shown = (name for name, each in CALLS.items() if each.is_shown_by(chat_template or ""))
    return next(shown, None)
