"""A certificate as one page for people."""

from rich import box
from rich.table import Table
from rich.text import Text

from jspec.tools.certify.report import Finding, Report

_MEANINGS = {
    "distribution": "distribution: total variation between the exact distribution of four tokens\n"
    "and the target's, with a vocabulary of three, in float64.",
    "chi-square": "chi-square: of the tokens of the compiled rule, above its mean, in units of\n"
    "10 sqrt(2 df); and of the tokens that are drafted too often, in 5 standard errors.",
    "drafter": "drafter: the number of malformed drafts; and chi-square, in its units, of draws\n"
    "by their quantile in the recorded distribution, alone and in pairs.",
    "text": "text: the largest gap at which texts diverge, in units of the rounding noise\n"
    "that was measured for this dtype; 0 where none do.",
    "engine": "engine: the same, between sequences that share an engine and each one alone.",
}


def page(report: Report) -> Table:
    """Return a table with a line per finding, and the meaning of the numbers below."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
        caption=_caption(report),
    )
    for heading in ("check", "of", "measured", "below", ""):
        is_number = heading in ("measured", "below")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number)
    for each in report.findings:
        verdict = Text("passed", "green") if each.passed else Text("FAILED", "bold red")
        measured = f"{each.measured:.1e}" if each.measured else "0"
        table.add_row(each.check, _words(each), measured, f"{each.limit:g}", verdict)
    return table


def _words(finding: Finding) -> Text:
    words = Text(finding.subject)
    if finding.note and (not finding.passed or finding.check in ("text", "engine")):
        words.append(f"\n{finding.note}", "yellow" if finding.passed else "red")
    return words


def _caption(report: Report) -> Text:
    wrong = len(report.failures)
    verdict = f"{wrong} of {len(report.findings)} FAILED" if wrong else "all passed"
    checks = {each.check for each in report.findings}
    lines = [
        f"{verdict}; " + ", ".join(f"{name} {value}" for name, value in report.setting.items()),
        *report.remarks,
        *(meaning for check, meaning in _MEANINGS.items() if check in checks),
    ]
    return Text("\n".join(lines))
