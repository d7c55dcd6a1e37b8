"""The output files of ``jspec bench``: JSON, Markdown, a picture, and a page with all of them."""

import base64
import importlib.resources
import json
from pathlib import Path
from typing import Any

import jinja2

from jspec.tools.bench import chart, report
from jspec.util import atomic_files


def write(results: dict[str, Any], folder: Path) -> None:
    """Write results.json, results.md, results.png and results.html atomically."""
    folder = atomic_files.followed(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json_of(results)
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
    """Write the results alone atomically."""
    atomic_files.write(path, json_of(results).encode() + b"\n")


def json_of(results: dict[str, Any]) -> str:
    """Return the results as JSON; values without a JSON form become text."""
    return json.dumps(results, indent=1, default=str)


def page(results: dict[str, Any], text: str, picture: bytes) -> str:
    """Return the HTML page, which needs no network."""
    source = importlib.resources.files("jspec.tools.bench").joinpath("page.html.jinja").read_text()
    template = jinja2.Environment(autoescape=True).from_string(source)
    return template.render(
        about=report.about(results),
        cases=list(report.tables(results)),
        json=text,
        notes=[note for note in report.notes(results) if note != report.about(results)],
        picture=base64.b64encode(picture).decode(),
    )
