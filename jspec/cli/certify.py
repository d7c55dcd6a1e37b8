"""``jspec certify``."""

import functools
from pathlib import Path

import typer
from rich.console import Console

from jspec.api.engine_args import EngineArgs
from jspec.cli import arguments, options
from jspec.cli.options import option
from jspec.cli.stages import Stages
from jspec.util import atomic_files

_PANEL = {"rich_help_panel": "Model"}
_OPTIONAL = {"kind": str | None, "default": None}  # a given one is of a model
_of_model = functools.partial(option, **_PANEL)
_sampling = functools.partial(option, rich_help_panel="Sampling")


@options.grouped
def certify(
    rule: option(
        list[str] | None,
        "A rule's name, or the dotted path of your rule; may be repeated. Default: all.",
    ) = None,
    vocab_size: option(int | None, "Vocabulary of the compiled rounds. Default: 16.") = None,
    tree: option(str | None, 'Parents of the enumerated drafts: "-1,0,0,1".') = None,
    model: _of_model(str | None, "Certify a model: a local directory or an id on the hub.") = None,
    speculative_config: options.engine_option("speculative_config", **_PANEL) = None,
    prompt: _of_model(list[str] | None, "May be repeated. Default: a few built-in prompts.") = None,
    prompt_file: _of_model(
        list[str] | None, "File with one prompt; - for standard input; may be repeated."
    ) = None,
    max_tokens: _of_model(int | None, "Most tokens of a text. Default: 64.") = None,
    num_drafts: _of_model(int | None, "Drafts whose tokens are counted. Default: 4096.") = None,
    *,
    settings: options.group(
        EngineArgs,
        *("dtype", "quantization", "kv_cache_dtype", "deterministic"),
        *("tensor_parallel_size", "enable_expert_parallel"),
        make=dict,
        changes={
            "dtype": _OPTIONAL,
            "kv_cache_dtype": _OPTIONAL,
            "deterministic": {"help": "As for jspec generate."},
        },
        **_PANEL,
    ),
    engine: _of_model(
        bool, "Compare texts in a shared engine with those alone.", "--engine"
    ) = False,
    sampling_backend: options.engine_option("sampling_backend") = None,
    temperature: _sampling(float | None, "More than 0. Default for a model: 0.8.") = None,
    top_p: _sampling(float | None, "1 keeps all tokens.") = None,
    top_k: _sampling(int | None, "0 keeps all tokens.") = None,
    min_p: _sampling(float | None, "0 keeps all tokens.") = None,
    seed: _sampling(int, "Seed of all noise.") = 0,
    json_file: option(Path | None, "File for the findings.", "--json") = None,
) -> None:
    """Prove that speculation keeps the target's distribution; exit code 1 if it does not."""
    config = options.speculative_config(speculative_config)
    texts = [*(prompt or ()), *(arguments.prompt(None, file, None) for file in prompt_file or ())]
    parents = None if tree is None else arguments.numbers("--tree", tree, "-1,0,0,1")
    atomic_files.check_output("--json", json_file)
    from jspec.engine import programs
    from jspec.tools.certify import certify
    from jspec.tools.certify.page import page

    programs.keep_compiled_programs()
    with Stages(Console(stderr=True)) as stage:
        stage.begin("loading")
        report = certify(
            rule or (),
            vocab_size=vocab_size,
            tree=parents,
            model=model,
            speculative_config=config,
            prompts=texts or None,
            max_tokens=max_tokens,
            num_drafts=num_drafts,
            engine=engine,
            sampling_backend=sampling_backend,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            **settings,
            progress=stage.begin,
        )
    Console().print(page(report))
    if json_file is not None:
        report.save(json_file)
    if not report.passed:
        raise typer.Exit(1)
