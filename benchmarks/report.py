"""Tables of the figures in the JSON file of ``benchmarks.latency``."""

from collections.abc import Sequence

from rich.table import Table


def latency_table(rows: Sequence[dict], facts: dict) -> Table:
    """Return a line for each case and peer mode, with the best of n and the ratio of medians."""
    device = facts["device"]
    table = Table(
        title=f"tokens/s on {device['cores']} cores of {device['cpu']}: "
        f"jspec against transformers {facts['versions']['transformers']}",
        caption="peer: mode / its better number of threads. "
        "= greedy: same text as plain greedy of jspec / of transformers. "
        "tau: tokens per target pass, jspec / transformers. x: ratio of the best of n (of the "
        "medians). quiet: undisturbed samples of all, jspec / transformers; "
        "?: a side has none, and the ratio is not valid.",
    )
    table.add_column("method", no_wrap=True)
    for name in ("batch", "T", "dtype", "K", "= greedy", "distinct", "tau", "jspec", "x own AR"):
        table.add_column(name, justify="right")
    table.add_column("peer", no_wrap=True)
    for name in ("theirs", "x", "quiet"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = _own_cells(row)
        for peer in row["peers"] or [None]:
            theirs = _tau(row, peer)
            table.add_row(*cells[:7], theirs, *cells[7:], *_peer_cells(peer), _quiet(row, peer))
            cells = [""] * len(cells)
        table.add_section()
    return table


def line(row: dict) -> str:
    """Return a row in one line, for a log."""
    case = row["case"]
    peers = ", ".join(f"{_ratio(peer)} x {_peer_cells(peer)[0]}" for peer in row["peers"])
    return (
        f"{case['method']} batch {case['batch']} T={case['temperature']:g} {case['dtype']}: "
        f"{row['ours']['tokens_per_second_best']:.0f} tokens/s, {peers}"
    )


def curve_table(curves: dict[str, dict]) -> Table:
    """Return V(N) / V(1) of the target and the draft model's cost for each dtype."""
    widths = next(iter(curves.values()))["milliseconds"].keys()
    table = Table(title="a target pass over N nodes, V(N) / V(1); c: a draft pass over V(1)")
    table.add_column("dtype")
    for name in ("V(1) ms", *(f"N={width}" if width == "1" else width for width in widths), "c"):
        table.add_column(name, justify="right")
    for dtype, curve in curves.items():
        ratios = [f"{ratio:.2f}" for ratio in curve["relative"].values()]
        first = next(iter(curve["milliseconds"].values()))
        table.add_row(dtype, f"{first:.2f}", *ratios, f"{curve['draft_cost']:.3f}")
    return table


def sweep_table(rows: Sequence[dict]) -> Table:
    """Return ``draft_model`` against plain decoding for each K."""
    table = Table(title="draft_model by K, against jspec's plain decoding in the same dtype")
    for name in ("dtype", "T", "K", "tau", "V(K+1)/V(1)", "c", "bound", "tokens/s", "own AR", "x"):
        table.add_column(name, justify="right")
    for row in rows:
        plain = row["own_autoregression"]
        table.add_row(
            row["case"]["dtype"],
            f"{row['case']['temperature']:g}",
            str(row["case"]["num_speculative_tokens"]),
            f"{row['ours']['acceptance_length']:.2f}",
            f"{row['widening']:.2f}",
            f"{row['draft_cost']:.3f}",
            f"{row['bound']:.2f}",
            f"{row['ours']['tokens_per_second_best']:.0f}",
            f"{plain['tokens_per_second_best']:.0f}",
            _ratio(plain),
        )
    return table


def _own_cells(row: dict) -> list[str]:
    case, ours = row["case"], row["ours"]
    plain = row.get("own_autoregression")
    return [
        case["method"],
        str(case["batch"]),
        f"{case['temperature']:g}",
        case["dtype"],
        str(case["num_speculative_tokens"] or "-"),
        _equality(ours),
        f"{ours['distinct_tokens']:.0f}",
        f"{ours['tokens_per_second_best']:.0f}",
        _ratio(plain) if plain else "-",
    ]


def _equality(ours: dict) -> str:
    """Return "yes", or the number of equal rows and the first difference, for both references."""
    if "equal_to_own_greedy" not in ours:
        return "-"
    return " / ".join(
        _verdict(ours[key]) for key in ("equal_to_own_greedy", "equal_to_peer_greedy")
    )


def _verdict(facts: dict) -> str:
    if facts["equal"]:
        return "yes"
    gap = f" gap {facts['gap']:.1e}" if "gap" in facts else ""
    return f"{facts['rows_equal']} of {facts['rows']}, at {facts['position']}{gap}"


def _tau(row: dict, peer: dict | None) -> str:
    theirs = peer and peer["acceptance_length"]
    cell = f"{row['ours']['acceptance_length']:.2f}"
    return f"{cell} / {theirs:.2f}" if theirs else cell


def _peer_cells(peer: dict | None) -> tuple[str, str, str]:
    if peer is None:
        return "-", "-", "-"
    return (
        f"{peer['mode']} /{peer['threads']}",
        f"{peer['tokens_per_second_best']:.0f}",
        _ratio(peer),
    )


def _quiet(row: dict, peer: dict | None) -> str:
    samples = [row["ours"]]
    if peer:
        samples.append(peer["by_threads"][str(peer["threads"])])
    return " / ".join(f"{each['quiet_samples']}:{len(each['seconds'])}" for each in samples)


def _ratio(figures: dict) -> str:
    doubt = "?" if figures["disturbed"] else ""
    return f"{figures['ratio_best']:.2f} ({figures['ratio_median']:.2f}){doubt}"
