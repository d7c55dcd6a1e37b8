"""``jspec run-batch``: the requests of a file, answered into a file."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from jspec.cli import options, server_options
from jspec.cli.options import option
from jspec.cli.stages import Stages

_BETWEEN_LINES = 100  # answers between two lines where there is no terminal


def run_batch(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A local directory, a GGUF file, or a model id on the hub. Default: as of serve."
        ),
    ] = None,
    model_flag: options.Model = None,
    input_file: option(
        Path, "File of requests, in OpenAI's batch format.", "-i", "--input-file"
    ) = ...,
    output_file: option(
        Path, "File for the answers; it must not exist.", "-o", "--output-file"
    ) = ...,
    served_model_name: option(list[str] | None, "The model's name in requests.") = None,
    speculative_config: options.Config = None,
    dtype: options.Dtype = "auto",
    seed: option(int, "Seed of requests without one.") = 0,
    max_model_len: option(int | None, "Longest text, prompt included.") = None,
    max_num_seqs: option(int, "Sequences that run together.", min=1) = 32,
    chat_template: option(str | None, "Jinja, or a file with it. Default: the model's.") = None,
    default_chat_template_kwargs: option(str | None, server_options.VARIABLES_HELP) = None,
    generation_config: option(str, "As of serve.") = "auto",
    override_generation_config: option(str | None, server_options.OVERRIDE_HELP) = None,
    chat_template_content_format: option(str, "As of serve.") = "auto",
    tool_call_parser: option(str | None, "As of serve.") = None,
    reasoning_parser: option(str | None, "As of serve.") = None,
) -> None:
    """Answer the requests of a batch file; a run that was killed goes on where it was."""
    model = options.model_of(model, model_flag)
    with server_options.named_extra():
        from jspec.server import batch, run
    server_options.check_forms(tool_call_parser, reasoning_parser, chat_template_content_format)
    chat_template = server_options.template_of(chat_template)
    lines = batch.read(input_file)
    output = batch.Output(output_file, lines)
    config = options.speculative_config(speculative_config)
    override = server_options.override(override_generation_config)
    variables = server_options.template_variables(default_chat_template_kwargs)
    sizes = dict(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    console = Console(stderr=True)
    with Stages(console) as stage:
        stage.begin("loading")
        llm, name = server_options.loaded(model, config, dtype=dtype, seed=seed, **sizes)
        settings = server_options.settings_of(
            llm,
            model_names=tuple(served_model_name or [name]),
            defaults=generation_config,
            override=override,
            template_variables=variables,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            tool_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
    done = len(output.done)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("answering", total=len(lines), completed=done)

        def count() -> None:
            bar.advance(task)
            if not console.is_terminal and len(output.done) % _BETWEEN_LINES == 0:
                stage.note(f"{len(output.done)} of {len(lines)} answered")

        num_failed = run.answer_batch(llm, settings, lines, output, on_answer=count)
    note = f"{len(lines)} answers in {output_file}"
    note += f", {done} of them from the run before" if done else ""
    console.print(f"{note}; {num_failed} of this run are errors.", markup=False)
