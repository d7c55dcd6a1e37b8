"""``jspec run-batch``: the requests of a file, answered into a file."""

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from jspec.cli import options, server_options
from jspec.cli.options import option
from jspec.cli.server_options import Answers
from jspec.cli.stages import Stages

_OF_SERVE = "generation_config chat_template_content_format tool_call_parser reasoning_parser"
_AS_OF_SERVE = {name: {"help": "As of serve."} for name in _OF_SERVE.split()}
_BETWEEN_LINES = 100  # answers between two lines where there is no terminal


@options.grouped
def run_batch(
    model: options.model("Default: as of serve.") = None,
    model_flag: options.Model = None,
    input_file: option(
        Path, "File of requests, in OpenAI's batch format.", "-i", "--input-file"
    ) = ...,
    output_file: option(
        Path, "File for the answers; it must not exist.", "-o", "--output-file"
    ) = ...,
    served_model_name: option(list[str] | None, "The model's name in requests.") = None,
    *,
    engine: options.engine(
        *("speculative_config", "dtype", "quantization", "seed", "max_model_len", "max_num_seqs"),
        *("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel"),
        *("attention_backend", "sampling_backend", "kv_cache_dtype"),
    ),
    answers: options.group(
        Answers,
        *("chat_template", "default_chat_template_kwargs", "generation_config"),
        *("override_generation_config", "chat_template_content_format"),
        *("tool_call_parser", "reasoning_parser"),
        changes=_AS_OF_SERVE,
    ),
) -> None:
    """Answer the requests of a batch file; a run that was killed goes on where it was."""
    model = options.model_of(model, model_flag)
    with server_options.named_extra():
        from jspec.server import batch, run
    given = answers.settings()
    lines = batch.read(input_file)
    output = batch.Output(output_file, lines)
    console = Console(stderr=True)
    with Stages(console) as stage:
        stage.begin("loading")
        llm, name = server_options.loaded(model, engine)
        names = tuple(served_model_name or [name])
        settings = server_options.settings_of(llm, model_names=names, **given)
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
