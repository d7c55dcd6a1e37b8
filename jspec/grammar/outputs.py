"""``structured_outputs``: an automaton on the device, or a grammar that the host follows.

An automaton costs nothing in a round, so it comes first. Where none fits, the host follows.
"""

from collections.abc import Callable
from typing import Any

from jspec.grammar import automata, followed


def check(outputs: Any) -> None:
    """Raise ValueError if no way takes a setting; see ``_first`` for which."""
    given = automata.setting_of(outputs)
    _first(given, lambda: automata.pattern_of(given), lambda: followed.source_of(given))


def resolved(
    outputs: Any, tokenizer: Any, ends: frozenset[int], vocab_size: int
) -> dict[str, automata.Grammar | followed.FollowedGrammar]:
    """Return the grammar of a setting, as a field of ``SequenceParams``.

    Args:
      outputs: as of ``automata.setting_of``.
      tokenizer: of the target, from transformers.
      ends: tokens that end a text.
      vocab_size: of the target.

    Raises:
      ValueError: no way takes the setting.
    """
    given = automata.setting_of(outputs)

    def on_device() -> dict[str, automata.Grammar]:
        pattern = automata.pattern_of(given)
        return {"grammar": automata.compiled(pattern, tokenizer, ends, vocab_size)}

    def on_host() -> dict[str, followed.FollowedGrammar]:
        return {"followed_grammar": followed.followed(given, tokenizer, ends, vocab_size)}

    return _first(given, on_device, on_host)


def _first(given: dict[str, Any], on_device: Callable[[], Any], on_host: Callable[[], Any]) -> Any:
    """Return the result of the first way that takes a setting.

    The error of a schema is that of the last way, which takes most; a pattern that is malformed
    has the error of its compiler.
    """
    if automata.AUTOMATIC.isdisjoint(given):
        return on_host()
    try:
        return on_device()
    except ValueError as error:
        try:
            return on_host()
        except ValueError as last:
            raise (last if "json" in given else error) from None
