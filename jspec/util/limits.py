"""Limits of the sizes that a request chooses: one table, for ``LLM`` and the server.

Work on a request grows with these sizes, and other requests wait for a part of it. So each size is
checked before the work begins, at a cost of at most the length of the input. ``LLM`` holds the
limits of ``SAMPLING`` and of prompts; the server holds all. Those of grammars are beside the
grammars.
"""

import dataclasses


class TooLarge(ValueError):
    """A size of a request is above its limit."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """The largest size of a field of requests."""

    field: str  # name of the field in errors
    most: int | str  # text: the model decides, and ``check`` takes the number
    unit: str
    reason: str
    flag: str | None = None  # option of ``jspec serve`` that sets another limit

    def check(self, size: int, most: int | None = None) -> None:
        """Raise TooLarge if a size is above ``most``; None for the limit of the table."""
        most = self.most if most is None else most
        if size <= most:
            return
        is_length = self.unit.startswith("characters") or " in a " in self.unit
        remedy = "shorten it" if is_length else "send fewer"
        if self.flag is not None:
            remedy += f", or start the server with a larger {self.flag}"
        raise TooLarge(
            f"{self.field} has {size} {self.unit}, but at most {most} are taken; {remedy}."
        )


STOP_STRINGS = Limit(
    "stop", 64, "strings", "each is compared with every new character; OpenAI takes 4"
)
STOP_CHARACTERS = Limit(
    "stop", 1000, "characters in a string", "as many may be held back from a stream"
)
STOP_TOKENS = Limit("stop_token_ids", 256, "ids", "a long list slows those that run beside it")
BAD_WORDS = Limit("bad_words", 1024, "words", "a long list slows those that run beside it")
BAD_WORD_CHARACTERS = Limit(
    "bad_words", 200, "characters in a word", "each word is tokenised twice"
)
BAD_WORD_TOKENS = Limit(
    "bad_words", 64, "tokens in a word", "a long word slows those that run beside it"
)
TEXTS = Limit("n", 16384, "texts", "vLLM's limit, for best_of too")
SAMPLING = (
    STOP_STRINGS,
    STOP_CHARACTERS,
    STOP_TOKENS,
    BAD_WORDS,
    BAD_WORD_CHARACTERS,
    BAD_WORD_TOKENS,
    TEXTS,
)

PROMPT_CHARACTERS = Limit(
    "prompt",
    "max_model_len times the longest token",
    "characters",
    "a longer text has more tokens than fit",
)

BODY_BYTES = Limit("body", 8 << 20, "bytes", "a larger one gets 413", "--max-body-bytes")
FIELDS = Limit("body", 256, "fields", "each unknown field is looked at")
TEXTS_OF_BODY = Limit(
    "prompt",
    2048,
    "texts, which are prompts times n",
    "OpenAI's limit of prompts",
    "--max-texts-per-request",
)
LOGIT_BIAS = Limit("logit_bias", "the vocabulary", "entries", "others are errors")
ALLOWED_TOKENS = Limit("allowed_token_ids", "the vocabulary", "ids", "others are errors")
ENTRIES = Limit(
    "prompt",
    1_000_000,
    "entries of lists such as logit_bias, times its prompts",
    "each prompt has the lists",
)
SCORES = Limit(
    "prompt_logprobs",
    4_000_000,
    "scores, of all prompts together",
    "each is an object of the server and a number of the answer; echo with logprobs has them too",
)
MESSAGES = Limit("messages", 10_000, "items", "a chat template reads all, in Python")
INPUT = Limit("input", MESSAGES.most, "items", "each becomes a message")
DOCUMENTS = Limit("documents", 10_000, "items", "a chat template reads all, in Python")
TOOLS = Limit("tools", 1024, "items", "OpenAI takes 128")
REQUEST_ID = Limit("request_id", 256, "characters", "every event of a stream has it")
CACHE_SALT = Limit("cache_salt", 256, "characters", "every page of the prompt is filed under it")
SERVER = (
    BODY_BYTES,
    FIELDS,
    TEXTS_OF_BODY,
    LOGIT_BIAS,
    ALLOWED_TOKENS,
    ENTRIES,
    SCORES,
    MESSAGES,
    INPUT,
    DOCUMENTS,
    TOOLS,
    REQUEST_ID,
    CACHE_SALT,
)

TABLE = (*SAMPLING, PROMPT_CHARACTERS, *SERVER)


def row(limit: Limit) -> str:
    """Return a limit as a row of the table in docs/serving.md.

    >>> print(row(TEXTS))
    | `n` | 16,384 texts | vLLM's limit, for best_of too |
    """
    is_number = isinstance(limit.most, int)
    size = f"{limit.most:,} {limit.unit}" if is_number else f"{limit.most}, in {limit.unit}"
    flag = "" if limit.flag is None else f"; `{limit.flag}`"
    return f"| `{limit.field}` | {size} | {limit.reason}{flag} |"
