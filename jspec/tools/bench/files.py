"""What ``--output`` holds: JSON, Markdown, a picture, and a page with all of it."""

import base64
import importlib.resources
import json
from pathlib import Path
from typing import Any

import jinja2

from jspec.tools.bench import chart, report
from jspec.util import atomic_files


def write(results: dict[str, Any], folder: Path) -> None:
    """Writes results.json, results.md, results.png and results.html, each whole or not at all."""
    folder = atomic_files.followed(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, default=str)
    picture = chart.draw(results)
    contents = {
        "results.json": text.encode() + b"\n",
        "results.md": report.markdown(results).encode(),
        "results.html": page(results, text, picture).encode(),
        "results.png": picture,
    }
    for name, content in contents.items():
        atomic_files.write(folder / name, content)


def write_json(results: dict[str, Any], path: Path) -> None:
    """Writes the results alone, whole or not at all."""
    text = json.dumps(results, indent=1, default=str)
    atomic_files.write(path, text.encode() + b"\n")


def page(results: dict[str, Any], text: str, picture: bytes) -> str:
    """The page; it fetches nothing."""
    source = importlib.resources.files("jspec.tools.bench").joinpath("page.html.jinja").read_text()
    cases = []
    for title, rows in report.titles(results):
        tables = [("", report.headings(), [report.cells(row) for row in rows])]
        if len(results["questions"]) > 1:
            caption = "speed-up and acceptance length by category (questions)"
            tables.append((caption, *report.by_category(results, rows)))
        cases.append((title, tables))
    template = jinja2.Environment(autoescape=True).from_string(source)
    return template.render(
        about=report.about(results),
        cases=cases,
        json=text,
        notes=[note for note in report.notes(results) if note != report.about(results)],
        picture=base64.b64encode(picture).decode(),
    )
