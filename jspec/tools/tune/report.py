"""The results of ``jspec tune`` as tables and notes for the terminal."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from jspec.tools.bench import report
from jspec.tools.bench.contenders import title_of

_DEPTHS = 5  # shown


def terminal(results: dict[str, Any]) -> Iterator[Table]:
    """Yield the table of acceptance, and for each batch size the candidates and the best."""
    if results["acceptance"]:
        yield _acceptance(results["acceptance"])
    for batch in results["batches"]:
        yield _speeds(f"{_title(batch)}: measured candidates", batch["candidates"])
        title = f"{_title(batch)}: the best, run in turns on {batch['prompts']} prompts"
        yield _speeds(title, batch["rows"])


def notes(results: dict[str, Any]) -> list[str]:
    """Return the lines below the tables: definitions, winners and warnings."""
    lines = [results["definition"], report.about(results | {"peer": "none"})]
    lines += report.left_out(results)
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
    if batch["ended_early"]:
        yield f"{title}: an unmeasured candidate may be faster; raise --max-programs."
    if second["tokens_per_second"]["most"] >= speed["least"]:
        yield f"{title}: the best two are within each other's spread."
    busy = sum(len(row["seconds"]) - row["quiet_samples"] for row in batch["rows"])
    if busy:
        yield f"{title}: other processes were busy during {busy} of the last samples."


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


def _speeds(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    heads = ("method", "tokens/s", "speed-up", "acceptance length", "by position")
    cells = [report.cells(row) for row in rows]
    return report.table(title, heads, [[line[head] for head in heads] for line in cells])
