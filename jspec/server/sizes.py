"""Sizes of a body, checked before its fields are validated."""

from typing import Any

from jspec.server.errors import RequestError
from jspec.server.fields import taken
from jspec.server.serving import Server
from jspec.util import limits

_OF_LISTS = (limits.MESSAGES, limits.INPUT, limits.DOCUMENTS, limits.TOOLS)
_OF_TEXTS = (limits.REQUEST_ID, limits.CACHE_SALT)
_OF_VOCABULARY = (limits.LOGIT_BIAS, limits.ALLOWED_TOKENS)
_OF_EACH_PROMPT = ("logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids", "stop")


def check(server: Server, given: Any) -> None:
    """Check the sizes of a body that was parsed; other faults of it are left to validation.

    Raises:
      RequestError: a size is above its limit.
    """
    if not isinstance(given, dict):
        return
    try:
        limits.FIELDS.check(len(given))
        _check_lengths(given, _OF_LISTS, list)
        _check_lengths(given, _OF_TEXTS, str)
        vocab_size = server.llm.build.plan.target.vocab_size
        _check_lengths(given, _OF_VOCABULARY, dict | list, vocab_size)
        _check_prompts(server, given)
    except limits.TooLarge as error:
        field = str(error).partition(" ")[0]
        raise RequestError(str(error), param=field if field in given else None) from None


def _check_lengths(
    given: dict[str, Any], all_limits: tuple[limits.Limit, ...], kind: Any, most: int | None = None
) -> None:
    for limit in all_limits:
        value = given.get(limit.field)
        if isinstance(value, kind):
            limit.check(len(value), most)


def _check_prompts(server: Server, given: dict[str, Any]) -> None:
    """Check the number of texts, and the lengths of prompts that are token ids."""
    prompts = given.get("prompt")
    if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int | float)):
        prompts = [prompts]
    counts = [taken(int, given.get(name)) for name in ("n", "best_of")]  # "2" and 2.0 count too
    num_texts = max((count for count in counts if isinstance(count, int)), default=1)
    limits.TEXTS_OF_BODY.check(len(prompts) * max(num_texts, 1), server.settings.max_texts)
    lists = [given.get(name) for name in _OF_EACH_PROMPT]
    num_entries = sum(len(each) for each in lists if isinstance(each, dict | list))
    limits.ENTRIES.check(len(prompts) * num_entries)
    if given.get("truncate_prompt_tokens") is None:
        longest = max((len(each) for each in prompts if isinstance(each, list)), default=0)
        server.room(longest, None)
