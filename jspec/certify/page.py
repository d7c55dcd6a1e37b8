"""A certificate as one page that a person can read."""

from rich import box
from rich.table import Table
from rich.text import Text

from jspec.certify.report import Report


def page(report: Report) -> Table:
    """A line for each finding, and what the numbers mean below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left",
                  caption_justify="left", caption=_caption(report))  # fmt: skip
    for heading in ("check", "of", "measured", "below", ""):
        is_number = heading in ("measured", "below")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number)
    for each in report.findings:
        words = Text(each.subject) if each.passed else Text(f"{each.subject}\n{each.note}")
        verdict = Text("passed", "green") if each.passed else Text("FAILED", "bold red")
        table.add_row(each.check, words, f"{each.measured:.1e}", f"{each.limit:g}", verdict)
    return table


def _caption(report: Report) -> str:
    wrong = len(report.failures)
    verdict = f"{wrong} of {len(report.findings)} FAILED" if wrong else "all passed"
    setting = ", ".join(f"{name} {value}" for name, value in report.setting.items())
    return (
        f"{verdict}; {setting}\n"
        "law: total variation between the exact law of four tokens and the target's,\n"
        "of a vocabulary of three, in float64. chi-square: of the tokens of the\n"
        "compiled rule, above its mean, in units of 10 sqrt(2 df)."
    )
