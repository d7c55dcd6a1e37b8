"""``jspec bench``."""

import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from jspec.cli import arguments, options
from jspec.cli.options import option
from jspec.cli.stages import Stages
from jspec.util.atomic_files import check_apart, check_output
from jspec.util.messages import shown

_many = functools.partial(option, rich_help_panel="Cases (each option may be repeated)")
_LOG_WIDTH = 200
_DEMO_K = 4
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


def bench(
    model: options.DemoModel = None,
    model_flag: options.Model = None,
    config: _many(list[str] | None, "A method's name, or a speculative_config as JSON.") = None,
    num_speculative_tokens: _many(
        list[int] | None, "K of configs without one.", "--num-speculative-tokens", "-k"
    ) = None,
    questions: _many(
        list[Path] | None,
        "Spec-Bench, HumanEval, GSM8K, ShareGPT, JSON lines with messages, prompt or text; any "
        "other file is one text.",
    ) = None,
    batch_size: _many(list[int] | None, "Default: 1.") = None,
    temperature: _many(list[float] | None, "Default: 0, greedy.") = None,
    max_tokens: options.AnswerTokens = 128,
    prompt_tokens: options.PromptTokens = 0,
    num_questions: options.NumQuestions = 0,
    repeats: option(int, "Undisturbed samples of each contender.") = 5,
    dtype: options.Dtype = "auto",
    quantization: _many(list[str] | None, "All methods once more with such weights.") = None,
    attention_backend: options.engine_option("attention_backend") = None,
    sampling_backend: options.engine_option("sampling_backend") = None,
    tensor_parallel_size: options.engine_option("tensor_parallel_size") = 1,
    enable_expert_parallel: options.engine_option("enable_expert_parallel") = False,
    data_parallel_size: options.engine_option("data_parallel_size") = 1,
    peers: option(bool, "Measure transformers too, if torch is installed.") = True,
    seed: options.NoiseSeed = 0,
    output: option(Path | None, "Folder for results.json, .md, .png and .html.") = None,
    json_file: option(Path | None, "File for the results alone.", "--json") = None,
) -> None:
    """Compare methods with plain decoding, in turns; Ctrl-C keeps finished measurements."""
    model = options.model_of(model, model_flag)
    from jspec.cli import demo
    from jspec.engine import programs
    from jspec.tools.bench import chart, environment, files, report
    from jspec.tools.bench.questions import read
    from jspec.tools.bench.run import bench as measure
    from jspec.tools.bench.settings import Settings

    _check_outputs(output, json_file)
    if output is not None:
        chart.check()
    if model is None:
        model, questions = str(demo.ASSETS / "target"), questions or [demo.PROMPT]
        if not config:
            config = [json.dumps({key: demo.EAGLE3[key] for key in ("method", "model")}), "ngram"]
            num_speculative_tokens = num_speculative_tokens or [_DEMO_K]
    settings = Settings(
        tuple(configs_of(config or [], num_speculative_tokens or [])),
        batch_sizes=tuple(batch_size or [1]),
        temperatures=tuple(temperature or [0.0]),
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        per_category=num_questions,
        repeats=repeats,
        dtype=dtype,
        quantizations=tuple(quantization or []),
        peers=peers,
        attention_backend=attention_backend,
        sampling_backend=sampling_backend,
        tensor_parallel_size=tensor_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        data_parallel_size=data_parallel_size,
        seed=seed,
    )
    asked, about = read(questions or [], num_questions), environment.describe("jspec")
    programs.keep_compiled_programs()

    def keep(results: dict[str, Any]) -> None:
        for write, path in ((files.write, output), (files.write_json, json_file)):
            if path is not None:
                write(about | results, path)

    with Stages(Console(stderr=True)) as stage:
        stage.begin("reading")
        results = about | measure(model, asked, settings, on_case=keep, on_step=stage.begin)
    finish(results, report)


def _check_outputs(folder: Path | None, json_file: Path | None) -> None:
    """Refuse outputs that cannot be written, or of which one would overwrite another."""
    check_output("--output", folder, folder=True)
    check_output("--json", json_file)
    if folder is not None:  # its results.json may be the same file
        written = (folder, *(folder / f"results.{kind}" for kind in ("md", "png", "html")))
        check_apart(*(("--output", path) for path in written), ("--json", json_file))


def finish(results: dict[str, Any], report: ModuleType) -> None:
    """Print the tables and notes of ``report``; exit with code 130 after Ctrl-C."""
    console = Console()
    if not console.is_terminal:  # a log or a pipe, in which nothing is cut off
        console = Console(width=_LOG_WIDTH)
    for table in report.terminal(results):
        console.print(table)
    for note in report.notes(results):
        console.print(Text(note))
    if results["interrupted"]:
        raise typer.Exit(130)


def configs_of(given: list[str], depths: list[int]) -> list[dict[str, Any]]:
    """Return every config, at every K of ``depths`` if it has none.

    Raises:
      ValueError: a config is not JSON or repeats a key, or ``depths`` applies to none.
    """
    configs: list[dict[str, Any]] = []
    depths_used = False
    for text in given:
        option = f"--config {shown(text)}"
        is_json = text.lstrip().startswith("{")
        config = arguments.json(option, text, _EXAMPLE) if is_json else {"method": text}
        has_k = "num_speculative_tokens" in config or not depths
        variants = [config] if has_k else [config | {"num_speculative_tokens": k} for k in depths]
        configs += [each for each in variants if each not in configs]
        depths_used = depths_used or not has_k
    if given and depths and not depths_used:
        raise ValueError(
            f"-k (--num-speculative-tokens) {depths[0]} is for configs without "
            "num_speculative_tokens, but every --config names one; leave it out there, or -k."
        )
    return configs
