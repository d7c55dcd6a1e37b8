"""Output of the command line: text with colored drafted tokens, and tables."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, get_args

from rich.table import Table
from rich.text import Text

from jspec import drafters, verify
from jspec.api.config import keys as config_keys
from jspec.api.detokenizer import Detokenizer
from jspec.api.llm import LLM
from jspec.api.outputs import CompletionOutput
from jspec.checkpoints import installed
from jspec.core.types import Proposal

DRAFTED = "bold green"  # drafted and accepted
TARGET = "yellow"  # drawn by the target itself


def legend() -> Text:
    """Return the meaning of the colors."""
    return Text.assemble(("drafted and accepted", DRAFTED), ", ", ("the target's own", TARGET))


def tokenizer_of(llm: LLM) -> Any:
    """Return the model's tokenizer, or None."""
    try:
        return llm.get_tokenizer()
    except ValueError:
        return None


def colored(tokenizer: Any, prompt: Sequence[int], output: CompletionOutput) -> Text:
    """Return the text of ``output`` with colors by source; needs detailed stats."""
    detokenizer = Detokenizer(tokenizer, prompt)
    marks = drafted_tokens(output.token_ids, output.speculative_decoding_stats)
    text = Text()
    for token, drafted in zip(output.token_ids, marks, strict=True):
        text.append(detokenizer.feed(token), DRAFTED if drafted else TARGET)
    text.append(detokenizer.flush(), TARGET)
    return text[: len(output.text)]  # without the stop token


def drafted_tokens(token_ids: Sequence[int], stats: dict[str, Any]) -> list[bool]:
    """Return whether each token was drafted, from per-round statistics.

    >>> drafted_tokens([5, 6, 7, 8], {"per_step_accepted": [2, 0],
    ...                               "per_step_drafted_token_ids": [[5, 6], [9]]})
    [True, True, False, False]
    """
    accepted = stats["per_step_accepted"]
    marks = [mark for count in accepted for mark in [True] * count + [False]]
    # A stop token or the limit may end the text within a path: then the last token was drafted.
    if accepted and token_ids[-1] in stats["per_step_drafted_token_ids"][-1][accepted[-1] :][:1]:
        marks[-1] = True
    return marks


def stats_table(output: CompletionOutput, seconds: float) -> Table:
    """Return one text's statistics, under vLLM's names."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in output.speculative_decoding_stats.items():
        if not name.startswith("per_step"):
            table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    table.add_row("num_tokens", str(len(output.token_ids)))
    table.add_row("seconds", f"{seconds:.2f}, compilation included")
    return table


def models_table() -> Table:
    """Return a table of the models and heads at hand, and of what drafts for which."""
    table = Table(show_lines=True)
    for heading in ("model", "from", "kind", "size", "dtype", "drafters that fit"):
        table.add_column(heading, overflow="fold")
    items = installed.everything()
    for item in items:
        name = Text.assemble(item.name, "\n", (str(item.path), "dim"))
        size = f"{item.num_parameters / 1e6:.1f} M"
        fitting = ", ".join(each.name for each in items if each.drafts_for(item))
        table.add_row(name, item.origin, item.kind, size, item.dtype, fitting)
    return table


def methods_table() -> Table:
    """Return a table of every drafting method."""
    table = Table(title="speculative_config: method", title_justify="left", show_lines=True)
    table.add_column("method", no_wrap=True)
    table.add_column("what it does, keys and defaults")
    cell = lambda summary, keys: Text.assemble(summary, "\n" if keys else "", (keys, "dim"))
    for name, method in drafters.METHODS.items():
        table.add_row(name, cell(_summary(method), _keys(name, method)))
    custom = config_keys.CUSTOM_CLASS_NOTE.replace("`", "")
    keys = "model (required), the fields of the class"
    table.add_row(config_keys.CUSTOM_CLASS, cell(custom, keys))
    return table


def rules_table() -> Table:
    """Return a table of every acceptance rule, and the drafts for which it is exact."""
    table = Table(
        title="speculative_config: rejection_sample_method",
        title_justify="left",
        caption="exact for: kinds of drafts (jspec.core.types.Proposal)\n"
        "lossy rules run only if their name is given",
        caption_justify="left",
        show_lines=True,
    )
    for heading in ("name", "rule", "what it does", "exact for", "lossless"):
        table.add_column(heading, no_wrap=heading != "what it does")
    for name, rule_name in config_keys.RULE_NAMES.items():
        rule = verify.RULES[rule_name]
        distributions = _exact_for(rule)
        lossless = "yes" if rule.lossless else "no"
        table.add_row(name, rule.name, rule.summary, distributions, lossless)
    return table


def _exact_for(rule: verify.Rule) -> str:
    """Return the kinds of drafts that a rule is exact for."""
    missing = set(get_args(Proposal)) - rule.exact_for
    if not rule.exact_for or not missing:
        return "all drafts" if rule.exact_for else "none"
    if len(missing) > 2:
        return "\n".join(sorted(rule.exact_for))
    return f"all drafts\nbut {', '.join(sorted(missing))}"


def _summary(method: type) -> str:
    """Return the first paragraph of the docstring of the method's file, in one line."""
    return (sys.modules[method.__module__].__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def _keys(method_name: str, method: type) -> str:
    """Return the fields of a drafter that are keys of ``speculative_config``."""
    fields = {field.name: field.default for field in dataclasses.fields(method)}
    default_model = "in the target" if method_name in config_keys.METHODS_IN_TARGETS else "required"
    lines = [f"model ({default_model})"] if "config" in fields else []
    for name, default in fields.items():
        if name in config_keys.KEYS:
            missing = default is dataclasses.MISSING
            lines.append(f"{name} (required)" if missing else f"{name}={default}")
    lines += ["parallel_drafting=False"] if method_name in drafters.PARALLEL else []
    return ", ".join(lines)
