"""``jspec bench``."""

import json
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from jspec.cli import arguments
from jspec.util.messages import shown
from jspec.util.values import check_apart, check_output

_MANY = {"rich_help_panel": "What is measured (each may be repeated)"}
_LOG_WIDTH = 200
_DEPTH = 4  # of the demo's
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


def bench(
    model: Annotated[
        str | None, typer.Argument(help="A local directory, or an id on the hub. The demo's.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help="A method's name, or a speculative_config as JSON.", **_MANY),
    ] = None,
    num_speculative_tokens: Annotated[
        list[int] | None,
        typer.Option("--num-speculative-tokens", "-k", help="K, of configs without.", **_MANY),
    ] = None,
    questions: Annotated[
        list[Path] | None,
        typer.Option(
            help="Spec-Bench, HumanEval, GSM8K, ShareGPT, JSON lines with messages, prompt or "
            "text; any other file is one text.",
            **_MANY,
        ),
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="1.", **_MANY)] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="0: greedy.", **_MANY)] = None,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 128,
    prompt_tokens: Annotated[
        int, typer.Option(help="Cut first turns to so many, leave longer ones out; 0: no limit.")
    ] = 0,
    num_questions: Annotated[int, typer.Option(min=0, help="Of each category; 0 for all.")] = 0,
    repeats: Annotated[int, typer.Option(help="Undisturbed samples of everyone.")] = 5,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    peers: Annotated[
        bool, typer.Option(help="Measure transformers, too, where torch is installed.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of all noise.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.json, .md, .png and .html.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for the results alone.")
    ] = None,
) -> None:
    """Measure methods beside plain decoding, in turns; Ctrl-C keeps what is done."""
    from jspec.cli import demo
    from jspec.engine import loading
    from jspec.tools.bench import chart, environment, files, report
    from jspec.tools.bench.questions import read
    from jspec.tools.bench.run import bench as measure
    from jspec.tools.bench.settings import Settings

    check_output("--output", output, folder=True)
    check_output("--json", json_file)
    if output is not None:  # its results.json would be the same
        taken = (output, *(output / f"results.{kind}" for kind in ("md", "png", "html")))
        check_apart(*(("--output", path) for path in taken), ("--json", json_file))
    if model is None:
        model, questions = str(demo.ASSETS / "target"), questions or [demo.PROMPT]
        if not config:
            head = {key: demo.EAGLE3[key] for key in ("method", "model")}
            config = [json.dumps(head), "ngram"]
            num_speculative_tokens = num_speculative_tokens or [_DEPTH]
    settings = Settings(
        tuple(configs_of(config or [], num_speculative_tokens or [])),
        batch_sizes=tuple(batch_size or [1]),
        temperatures=tuple(temperature or [0.0]),
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        per_category=num_questions,
        repeats=repeats,
        dtype=dtype,
        peers=peers,
        seed=seed,
    )
    asked = read(questions or [], num_questions)
    if output is not None:
        chart.check()
    about = environment.describe("jspec")
    loading.keep_compiled_programs()

    def keep(results: dict[str, Any]) -> None:
        if output is not None:
            files.write(about | results, output)
        if json_file is not None:
            files.write_json(about | results, json_file)

    with Console(stderr=True).status("reading") as status:
        results = about | measure(
            model, asked, settings, on_case=keep, on_step=lambda words: status.update(Text(words))
        )
    finish(results, report)


def finish(results: dict[str, Any], report: ModuleType) -> None:
    """Prints the tables and notes that ``report`` makes of results; exit code 130 after Ctrl-C."""
    console = Console()
    if not console.is_terminal:  # a log or a pipe: nothing is cut off there
        console = Console(width=_LOG_WIDTH)
    for table in report.terminal(results):
        console.print(table)
    for note in report.notes(results):
        console.print(Text(note))
    if results["interrupted"]:
        raise typer.Exit(130)


def configs_of(given: list[str], depths: list[int]) -> list[dict[str, Any]]:
    """Every config, at every K where it names none.

    Raises:
      ValueError: one is not JSON or has a key twice, or all name a K and ``depths`` are given.
    """
    found: list[dict[str, Any]] = []
    all_apart = bool(given and depths)
    for text in given:
        option = f"--config {shown(text)}"
        is_json = text.lstrip().startswith("{")
        config = arguments.json(option, text, _EXAMPLE) if is_json else {"method": text}
        apart = "num_speculative_tokens" in config or not depths
        all_apart = all_apart and apart
        some = [config] if apart else [config | {"num_speculative_tokens": k} for k in depths]
        found += [each for each in some if each not in found]
    if all_apart:
        raise ValueError(
            f"-k (--num-speculative-tokens) {depths[0]} is for configs without "
            "num_speculative_tokens, but every --config names one; leave it out there, or -k."
        )
    return found
