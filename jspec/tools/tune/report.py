"""Results of ``jspec tune`` for people: tables and notes in the terminal."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from jspec.tools.bench import report
from jspec.tools.tune.run import TOLERANCE

_DEPTHS = 5  # that are shown


def terminal(results: dict[str, Any]) -> Iterator[Table]:
    """What is accepted; and for each batch size what was run and what was predicted."""
    yield from _acceptance(results["acceptance"])
    for batch in results["batches"]:
        yield _candidates(batch)
        yield _runs(batch)


def notes(results: dict[str, Any]) -> list[str]:
    """What stands below the tables: the winners, and what is to be doubted."""
    lines = [results["definition"], report.about(results | {"peer": "none"})]
    lines += report.left_out(results)
    if results["left_out_methods"]:
        lines.append(
            f"Left out: {', '.join(results['left_out_methods'])}; the answers are too short for "
            "the drafts, raise --max-tokens."
        )
    if results["interrupted"]:
        lines.append("The run was interrupted: what was not finished is left out.")
    for batch in results["batches"]:
        lines += _verdict(batch)
    return lines


def output(results: dict[str, Any]) -> dict[str, Any] | None:
    """What ``--output`` holds: the ``speculative_config``, or one for each of several batch sizes.

    None where nothing was finished.
    """
    found = {str(batch["batch_size"]): batch["speculative_config"] for batch in results["batches"]}
    if len(results["setting"]["batch_sizes"]) > 1:
        return found or None
    return next(iter(found.values()), None)


def _verdict(batch: dict[str, Any]) -> Iterator[str]:
    """Who won a batch size, and how well that was predicted."""
    title, (winner, second, *_) = _title(batch), batch["rows"]
    speed, ratio = winner["tokens_per_second"], winner["speedup"]
    words = f"{title}: {winner['name']}, {speed['median']:.0f} tokens/s"
    if winner["config"] == {"method": "none"}:
        words += "; nothing that was searched is faster than plain decoding"
    else:
        words += f", {ratio['median']:.2f} times plain decoding"
    yield f"{words}. {json.dumps(batch['speculative_config'], default=str)}"
    predicted = max(batch["rows"], key=lambda row: row["predicted_tokens_per_second"])
    if predicted["speculative_config"] != winner["speculative_config"]:  # names may be equal
        yield f"{title}: predicted was {predicted['name']}; the faster of the two counts."
    best = predicted["predicted_tokens_per_second"]
    if any(
        each["predicted_tokens_per_second"] > best
        for each in batch["candidates"]
        if not each["round_was_measured"]
    ):
        yield f"{title}: what was not measured may be faster; raise --max-programs."
    if second["tokens_per_second"]["most"] >= speed["least"]:
        yield f"{title}: the best two are within each other's spread."
    if not batch["within_tolerance"]:
        off = ", ".join(f"{row['name']} {row['error']:+.0%}" for row in batch["rows"])
        yield (
            f"{title}: a prediction is off by more than {TOLERANCE:.0%} ({off}); other processes, "
            "or answers unlike those recorded: give more questions, or an idle machine."
        )
    if batch["quiet_turns"] < batch["turns"]:
        busy = batch["turns"] - batch["quiet_turns"]
        words = "they were left out" if batch["quiet_turns"] else "so that all had to count"
        yield f"{title}: other processes were busy in {busy} of {batch['turns']} turns; {words}."


def _title(batch: dict[str, Any]) -> str:
    drawn = f"temperature {batch['temperature']:g}" if batch["temperature"] else "greedy"
    return f"batch {batch['batch_size']}, {drawn}"


def _acceptance(families: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """A line for each family: by depth, the chances of the children of each rank."""
    if not families:
        return
    table = Table(title="accepted children of an accepted node, by rank", title_justify="left")
    table.add_column("method")
    deepest = min(_DEPTHS, max(len(family["chances"]) for family in families))
    for depth in range(1, deepest + 1):
        table.add_column(f"depth {depth}", justify="right")
    for family in families:
        cells = [
            " ".join(f"{share:.2f}" for share in ranks) + f"\n({tried[0]})"
            for ranks, tried in zip(
                family["chances"][:deepest], family["tried"][:deepest], strict=True
            )
        ]
        table.add_row(Text(family["name"]), *cells)
    table.caption = "in brackets: how many nodes were looked at"
    yield table


def _candidates(batch: dict[str, Any]) -> Table:
    """The best of those that were searched, and the pass that they share."""
    table = Table(title=f"{_title(batch)}: predictions", title_justify="left")
    table.add_column("method", no_wrap=True)
    for head in ("tokens/s", "acceptance length", "round, ms"):
        table.add_column(head, justify="right")
    for each in batch["candidates"]:
        mark = "" if each["round_was_measured"] else " at least"
        table.add_row(
            Text(each["name"]),
            f"{each['predicted_tokens_per_second']:.0f}"
            + ("" if each["round_was_measured"] else " at most"),
            f"{each['predicted_acceptance_length']:.2f}",
            f"{each['round_ms']:.2f}{mark}",
        )
    one = batch["pass_ms"][min(batch["pass_ms"], key=int)]
    ratios = ", ".join(f"{size}: {ms / one:.2f}" for size, ms in batch["pass_ms"].items())
    table.caption = (
        f"a pass of the target over one node a row: {one:.2f} ms; over N beside: {ratios}"
    )
    return table


def _runs(batch: dict[str, Any]) -> Table:
    """Those that were run: prediction and measurement side by side."""
    table = Table(
        title=f"{_title(batch)}: run in turns on {batch['prompts']} prompts", title_justify="left"
    )
    table.add_column("method", no_wrap=True)
    for head in (
        "tokens/s predicted",
        "measured",
        "error",
        "speed-up predicted",
        "measured",
        "acceptance length predicted",
        "measured",
    ):
        table.add_column(head, justify="right")
    for row in batch["rows"]:
        speed, ratio = row["tokens_per_second"], row["speedup"]
        table.add_row(
            Text(row["name"]),
            f"{row['predicted_tokens_per_second']:.0f}",
            f"{speed['median']:.0f} ({speed['least']:.0f} to {speed['most']:.0f})",
            f"{row['error']:+.1%}",
            f"{row['predicted_speedup']:.2f}",
            f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})",
            f"{row['predicted_acceptance_length']:.2f}",
            f"{row['acceptance_length']:.2f}",
        )
    return table
