"""The results of ``jspec tune`` as tables and notes for the terminal."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from jspec.tools.bench import report
from jspec.tools.bench.contenders import title_of
from jspec.tools.tune.search import TOLERANCE

_DEPTHS = 5  # shown


def terminal(results: dict[str, Any]) -> Iterator[Table]:
    """Yield the table of acceptance, and for each batch size the predictions and the runs."""
    if results["acceptance"]:
        yield _acceptance(results["acceptance"])
    for batch in results["batches"]:
        yield _candidates(batch)
        yield _runs(batch)


def notes(results: dict[str, Any]) -> list[str]:
    """Return the lines below the tables: definitions, winners and warnings."""
    lines = [results["definition"], report.about(results | {"peer": "none"})]
    lines += report.left_out(results)
    if results["left_out_methods"]:
        lines.append(
            f"Left out: {', '.join(results['left_out_methods'])}; the answers are too short for "
            "the drafts, raise --max-tokens."
        )
    if results["interrupted"]:
        lines.append("The run was interrupted; unfinished batch sizes are missing.")
    for batch in results["batches"]:
        lines += _verdict(batch)
    return lines


def output(results: dict[str, Any]) -> dict[str, Any] | None:
    """Return the contents of ``--output``; None if no batch size is finished.

    They are the ``speculative_config``, or one for each of several batch sizes.
    """
    configs = {
        str(batch["batch_size"]): batch["speculative_config"] for batch in results["batches"]
    }
    if len(results["setting"]["batch_sizes"]) > 1:
        return configs or None
    return next(iter(configs.values()), None)


def _verdict(batch: dict[str, Any]) -> Iterator[str]:
    title, (winner, second, *_) = _title(batch), batch["rows"]
    speed, ratio = winner["tokens_per_second"], winner["speedup"]
    words = f"{title}: {winner['name']}, {speed['median']:.0f} tokens/s"
    if winner["config"] == {"method": "none"}:
        words += "; no candidate is faster than plain decoding"
    else:
        words += f", {ratio['median']:.2f} times plain decoding"
    yield f"{words}. {json.dumps(batch['speculative_config'], default=str)}"
    predicted = max(batch["rows"], key=lambda row: row["predicted_tokens_per_second"])
    if predicted["speculative_config"] != winner["speculative_config"]:  # names may be equal
        yield f"{title}: the prediction was {predicted['name']}; the measured winner counts."
    best = predicted["predicted_tokens_per_second"]
    if any(
        each["predicted_tokens_per_second"] > best
        for each in batch["candidates"]
        if not each["round_was_measured"]
    ):
        yield f"{title}: an unmeasured candidate may be faster; raise --max-programs."
    if second["tokens_per_second"]["most"] >= speed["least"]:
        yield f"{title}: the best two are within each other's spread."
    if not batch["within_tolerance"]:
        errors = ", ".join(f"{row['name']} {row['error']:+.0%}" for row in batch["rows"])
        yield (
            f"{title}: a prediction is off by more than {TOLERANCE:.0%} ({errors}); give more "
            "questions, or an idle machine."
        )
    if batch["quiet_turns"] < batch["turns"]:
        busy = batch["turns"] - batch["quiet_turns"]
        words = "they were left out" if batch["quiet_turns"] else "so that all had to count"
        yield f"{title}: other processes were busy in {busy} of {batch['turns']} turns; {words}."


def _title(batch: dict[str, Any]) -> str:
    return title_of(batch["batch_size"], batch["temperature"])


def _acceptance(families: Sequence[dict[str, Any]]) -> Table:
    """Return a line for each family: by depth, the chances of the children of each rank."""
    deepest = min(_DEPTHS, max(len(family["chances"]) for family in families))
    lines = []
    for family in families:
        depths = zip(family["chances"][:deepest], family["tried"][:deepest], strict=True)
        cells = [f"{' '.join(f'{p:.2f}' for p in ranks)}\n({tried[0]})" for ranks, tried in depths]
        lines.append([family["name"], *cells])
    heads = ["method", *(f"depth {depth}" for depth in range(1, deepest + 1))]
    table = report.table("acceptance of the children of an accepted node, by rank", heads, lines)
    table.caption = "in brackets: accepted nodes that were counted"
    return table


def _candidates(batch: dict[str, Any]) -> Table:
    """Return the predictions for the best candidates, and V(N, B) below."""
    lines = []
    for each in batch["candidates"]:
        most, least = ("", "") if each["round_was_measured"] else (" at most", " at least")
        speed = f"{each['predicted_tokens_per_second']:.0f}{most}"
        length = f"{each['predicted_acceptance_length']:.2f}"
        lines.append([each["name"], speed, length, f"{each['round_ms']:.2f}{least}"])
    heads = ("method", "tokens/s", "acceptance length", "round, ms")
    table = report.table(f"{_title(batch)}: predictions", heads, lines)
    single = batch["pass_ms"][min(batch["pass_ms"], key=int)]
    ratios = ", ".join(f"{size}: {ms / single:.2f}" for size, ms in batch["pass_ms"].items())
    table.caption = (
        f"a pass of the target over one node a row: {single:.2f} ms; over N, as a ratio: {ratios}"
    )
    return table


def _runs(batch: dict[str, Any]) -> Table:
    lines = [
        [
            ("method", row["name"]),
            ("tokens/s predicted", f"{row['predicted_tokens_per_second']:.0f}"),
            ("measured", report.spread(row["tokens_per_second"], 0)),
            ("error", f"{row['error']:+.1%}"),
            ("speed-up predicted", f"{row['predicted_speedup']:.2f}"),
            ("measured", report.spread(row["speedup"], 2)),
            ("acceptance length predicted", f"{row['predicted_acceptance_length']:.2f}"),
            ("measured", f"{row['acceptance_length']:.2f}"),
        ]
        for row in batch["rows"]
    ]
    title = f"{_title(batch)}: run in turns on {batch['prompts']} prompts"
    cells = [[cell for _, cell in line] for line in lines]
    return report.table(title, [head for head, _ in lines[0]], cells)
