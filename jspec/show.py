"""What the command line shows: text that tells drafted tokens from the target's own, and tables."""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

DRAFTED = "bold green"  # drafted, and accepted by the target
OWN = "yellow"  # drawn by the target itself
_CONTEXT = 6  # tokens decoded before a new one: spaces and characters depend on what precedes


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(("drafted and accepted", DRAFTED), "  ", ("the target's own", OWN))


def colored(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], stats: dict
) -> Text:
    """The text of ``token_ids``, drafted and accepted tokens apart from the target's own.

    ``stats`` are detailed ``speculative_decoding_stats``.
    """
    text = Text()
    drafted = drafted_tokens(token_ids, stats)
    for piece, was_drafted in zip(pieces(decode, token_ids), drafted, strict=True):
        text.append(piece, DRAFTED if was_drafted else OWN)
    return text


def drafted_tokens(token_ids: Sequence[int], stats: dict) -> list[bool]:
    """Whether each token was drafted, from what every round accepted.

    >>> drafted_tokens([5, 6, 7, 8], {"per_step_accepted": [2, 0]})
    [True, True, False, False]
    """
    marks: list[bool] = []
    for accepted in stats.get("per_step_accepted", ()):
        marks += [True] * accepted + [False]
    marks = marks[: len(token_ids)] + [False] * (len(token_ids) - len(marks))
    last_draft = stats.get("per_step_drafted_token_ids", [[]])[-1:] or [[]]
    accepted = stats.get("per_step_accepted", [0])[-1:] or [0]
    # A stop token or the limit inside the accepted path ends the text with a drafted token.
    if len(last_draft[0]) > accepted[0] and last_draft[0][accepted[0]] == token_ids[-1]:
        marks[-1] = True
    return marks


def pieces(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> Iterator[str]:
    """The text that each token adds; a character of several tokens comes with its last one."""
    begin = shown = 0  # the context being decoded, and how much of its text is out already
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[begin:end])
        if text.endswith("\ufffd") and end < len(token_ids):
            yield ""
            continue
        yield text[shown:]
        shown = len(text)
        if end - begin >= 2 * _CONTEXT:
            begin = end - _CONTEXT
            shown = len(decode(token_ids[begin:end]))


def stats_table(stats: dict, seconds: float, num_tokens: int) -> Table:
    """One request's statistics, under the names that vLLM gives them."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in stats.items():
        if not name.startswith("per_step"):
            table.add_row(name, _short(value))
    table.add_row("tokens", str(num_tokens))
    table.add_row("seconds", f"{seconds:.2f} (compilation included)")
    return table


def rates(values: Sequence[float]) -> str:
    """Acceptance by position, as percentages."""
    return " ".join(f"{100 * value:.0f}" for value in values)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list | tuple):
        return " ".join(_short(item) for item in value)
    return str(value)
