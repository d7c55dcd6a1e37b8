"""``jspec certify``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jspec.cli import arguments, options
from jspec.cli.options import SAMPLING
from jspec.util import values

_MODEL = {"rich_help_panel": "Model"}


def certify(
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="A rule's name, or the dotted path of your rule; may be repeated. Default: all."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary of the compiled rounds. Default: 16.")
    ] = None,
    tree: Annotated[
        str | None, typer.Option(help='Parents of the enumerated drafts: "-1,0,0,1".')
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Certify a model: a local directory or an id on the hub.", **_MODEL),
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(help=options.CONFIG_HELP, **_MODEL)
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated. Default: a few built-in prompts.", **_MODEL),
    ] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(help="File with one prompt; - for standard input; may be repeated.", **_MODEL),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a text. Default: 64.", **_MODEL)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=options.DTYPE_HELP, **_MODEL)] = None,
    num_drafts: Annotated[
        int | None, typer.Option(help="Drafts whose tokens are counted. Default: 4096.", **_MODEL)
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="As for jspec generate.", **_MODEL)
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="More than 0. Default for a model: 0.8.", **SAMPLING)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="1 keeps all tokens.", **SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps all tokens.", **SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option(help="0 keeps all tokens.", **SAMPLING)] = None,
    seed: Annotated[int, typer.Option(help="Seed of all noise.", **SAMPLING)] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the findings.")] = None,
) -> None:
    """Prove that speculation keeps the target's distribution; exit code 1 if it does not."""
    config = options.speculative_config(speculative_config)
    texts = [*(prompt or ()), *(arguments.prompt(None, file, None) for file in prompt_file or ())]
    parents = None if tree is None else arguments.numbers("--tree", tree, "-1,0,0,1")
    values.check_output("--json", json_file)
    from jspec.engine import loading
    from jspec.tools.certify import certify
    from jspec.tools.certify.page import page

    loading.keep_compiled_programs()
    with Console(stderr=True).status("loading") as status:
        report = certify(
            rule or (),
            vocab_size=vocab_size,
            tree=parents,
            model=model,
            speculative_config=config,
            prompts=texts or None,
            max_tokens=max_tokens,
            dtype=dtype,
            num_drafts=num_drafts,
            deterministic=deterministic,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            progress=status.update,
        )
    Console().print(page(report))
    if json_file is not None:
        report.save(json_file)
    if not report.passed:
        raise typer.Exit(1)
