"""What the command line shows: text that tells drafted tokens from the target's own, and tables."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from jspec import config_keys, drafters, verify
from jspec.outputs import CompletionOutput
from jspec.text import Detokenizer

DRAFTED = "bold green"  # drafted, and accepted by the target
OWN = "yellow"  # drawn by the target itself

def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(("drafted and accepted", DRAFTED), ", ", ("the target's own", OWN))


def colored(tokenizer: Any, prompt: Sequence[int], output: CompletionOutput) -> Text:
    """The text of ``output``, drafted tokens apart from the target's own; needs detailed stats."""
    detokenizer = Detokenizer(tokenizer, prompt)
    marks = drafted_tokens(output.token_ids, output.speculative_decoding_stats)
    text = Text()
    for token, drafted in zip(output.token_ids, marks, strict=True):
        text.append(detokenizer.feed(token), DRAFTED if drafted else OWN)
    text.append(detokenizer.flush(), OWN)
    return text[: len(output.text)]  # a stop string is not shown


def drafted_tokens(token_ids: Sequence[int], stats: dict[str, Any]) -> list[bool]:
    """Whether each token was drafted, from what every round drafted and accepted.

    >>> drafted_tokens([5, 6, 7, 8], {"per_step_accepted": [2, 0],
    ...                               "per_step_drafted_token_ids": [[5, 6], [9]]})
    [True, True, False, False]
    """
    accepted = stats["per_step_accepted"]
    marks = [mark for count in accepted for mark in [True] * count + [False]]
    # A stop or the limit may cut the accepted path: then the last token was drafted, too.
    if accepted and token_ids[-1] in stats["per_step_drafted_token_ids"][-1][accepted[-1] :][:1]:
        marks[-1] = True
    return marks


def stats_table(stats: dict[str, Any], seconds: float, num_tokens: int) -> Table:
    """One request's statistics, under the names that vLLM gives them."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in stats.items():
        if not name.startswith("per_step"):
            table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    table.add_row("num_tokens", str(num_tokens))
    table.add_row("seconds", f"{seconds:.2f}, compilation included")
    return table


def methods_table() -> Table:
    """Every drafting method of the registry, and those of vLLM's that are still to be built."""
    table = Table(title="speculative_config: method", title_justify="left")
    for heading in ("method", "what it does", "keys and defaults", "drafts", "status"):
        table.add_column(heading, no_wrap=heading in ("method", "status"))
    for name, method in drafters.METHODS.items():
        table.add_row(name, _summary(method), _keys(method), _law(method), "works")
    for name in config_keys.METHODS_NOT_BUILT:
        table.add_row(name, "", "", "", "not built", style="dim")
    return table


def rules_table() -> Table:
    """Every acceptance rule, and the drafts for which it leaves the target's distribution."""
    table = Table(title="speculative_config: rejection_sample_method", title_justify="left")
    for heading in ("name", "rule", "what it does", "exact for", "lossless"):
        table.add_column(heading, no_wrap=heading != "what it does")
    for name, rule_name in config_keys.RULE_NAMES.items():
        rule = verify.RULES[rule_name]
        every = len(rule.exact_for) > 2
        laws = "all drafts" if every else ", ".join(sorted(rule.exact_for | {"point"}))
        lossless = "yes" if rule.lossless else "no"
        table.add_row(name, rule.name, rule.summary, laws, lossless)
    return table


def _summary(method: type) -> str:
    """The first paragraph of the docstring of the method's file, in one line."""
    return (sys.modules[method.__module__].__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def _keys(method: type) -> str:
    """The fields of a drafter that are keys of ``speculative_config``, one a line."""
    lines = []
    for field in dataclasses.fields(method):
        if field.name in config_keys.KEYS:
            required = field.default is dataclasses.MISSING
            lines.append(f"{field.name} (required)" if required else f"{field.name}={field.default}")
    return "\n".join(lines)


def _law(method: type) -> str:
    """The law of a method's drafts, or what it depends on."""
    law = method.proposal
    return law if isinstance(law, str) else (law.__doc__ or "")
