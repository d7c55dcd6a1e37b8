"""``jspec tune``."""

import functools
from pathlib import Path
from typing import Any

from rich.console import Console

from jspec.cli import options
from jspec.cli.bench import configs_of, finish
from jspec.cli.options import option
from jspec.cli.stages import Stages
from jspec.util.atomic_files import check_apart, check_output

_many = functools.partial(option, rich_help_panel="Search space (each option may be repeated)")
_LOOKUP = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
# Methods without weights.
_DEFAULT = (_LOOKUP, {"method": "suffix"}, {"method": "token_recycling"})


def tune(
    model: options.DemoModel = None,
    model_flag: options.Model = None,
    config: _many(
        list[str] | None,
        "A method's name, or a speculative_config as JSON. K and tree are searched if it sets "
        "neither. Default: the methods without weights.",
    ) = None,
    questions: _many(list[Path] | None, "Your prompts, in files that jspec bench reads.") = None,
    batch_size: _many(list[int] | None, "Each has its own winner. Default: 1.") = None,
    temperature: option(float, "0 is greedy.") = 0.0,
    max_speculative_tokens: option(int, "Largest K.") = 8,
    max_tree_size: option(int, "Most nodes of a tree, root included, from 4; 0: chains.") = 32,
    max_programs: option(int, "Most candidates that are measured at a batch size.") = 16,
    max_tokens: options.AnswerTokens = 128,
    prompt_tokens: options.PromptTokens = 0,
    num_questions: options.NumQuestions = 0,
    repeats: option(int, "Undisturbed samples of each measurement.") = 5,
    dtype: options.Dtype = "auto",
    quantization: options.engine_option("quantization") = None,
    tensor_parallel_size: options.engine_option("tensor_parallel_size") = 1,
    enable_expert_parallel: options.engine_option("enable_expert_parallel") = False,
    seed: options.NoiseSeed = 0,
    output: option(
        Path | None, "File for the speculative_config, by batch size if there are several."
    ) = None,
    json_file: option(Path | None, "File for all measurements.", "--json") = None,
) -> None:
    """Find the fastest speculative_config for your prompts; Ctrl-C keeps finished batch sizes."""
    model = options.model_of(model, model_flag)
    check_output("--output", output)
    check_output("--json", json_file)
    check_apart(("--output", output), ("--json", json_file))
    from jspec.cli import demo
    from jspec.engine import programs
    from jspec.tools.bench import environment, files
    from jspec.tools.bench.questions import read
    from jspec.tools.tune import report
    from jspec.tools.tune.run import tune as search
    from jspec.tools.tune.settings import Settings

    configs = configs_of(config or [], []) or list(_DEFAULT)
    if model is None:
        model = str(demo.ASSETS / "target")
        if not config:
            configs += demo.configs()
        questions = questions or [demo.PROMPT]
    settings = Settings(
        tuple(configs),
        tuple(batch_size or [1]),
        temperature,
        max_speculative_tokens=max_speculative_tokens,
        max_tree_size=max_tree_size,
        max_programs=max_programs,
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        per_category=num_questions,
        repeats=repeats,
        dtype=dtype,
        quantization=quantization,
        tensor_parallel_size=tensor_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        seed=seed,
    )
    asked = read(questions or [], num_questions)
    about = environment.describe("jspec")
    programs.keep_compiled_programs()

    def keep(results: dict[str, Any]) -> None:
        if json_file is not None:
            files.write_json(about | results, json_file)
        if output is not None and report.output(results) is not None:
            files.write_json(report.output(results), output)

    with Stages(Console(stderr=True)) as stage:
        stage.begin("reading")
        results = about | search(model, asked, settings, on_batch=keep, on_step=stage.begin)
    keep(results)
    finish(results, report)
