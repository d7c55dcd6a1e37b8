"""``jspec generate`` and ``jspec trace``."""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from jspec.cli import arguments, options
from jspec.cli.options import option
from jspec.util import atomic_files

if TYPE_CHECKING:  # commands import it when they run, so that --help is fast
    from jspec.api.llm import LLM
    from jspec.api.sampling_params import SamplingParams


@options.grouped
def generate(
    model: options.model() = None,
    prompt: options.PromptText = None,
    model_flag: options.Model = None,
    prompt_file: options.PromptFile = None,
    token_ids: options.TokenIds = None,
    chat: options.Chat = False,
    *,
    engine: options.engine(
        *("speculative_config", "dtype", "quantization", "kv_cache_dtype"),
        *("max_model_len", "deterministic"),
        *("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel"),
        changes={
            "max_model_len": {"help": "Longest sequence, prompt included."},
            "deterministic": {"help": "Equal logits for every batch and draft; slower."},
        },
    ),
    stream: option(bool, "Print the text while it is generated.", "--stream") = False,
    stats: option(bool, "Color drafted tokens; print statistics.", "--stats") = False,
    sampling: options.sampling(),
) -> None:
    """Continue a prompt."""
    model, prompt = options.model_and_prompt(model, prompt, model_flag)
    if model is None:
        raise typer.BadParameter("the model is missing; give MODEL or --model.")
    given = arguments.prompt(prompt, prompt_file, token_ids, chat)
    if stream and sampling["n"] > 1:
        count = sampling["n"]
        raise ValueError(f"--stream prints one text, but -n is {count}; leave one of them out.")
    from jspec.api.llm import LLM
    from jspec.api.sampling_params import SamplingParams

    params = SamplingParams(**sampling)
    with options.busy("loading"):
        args = dataclasses.replace(engine, per_request_stats="detailed" if stats else None)
        llm = LLM(model, **vars(args))
    given, params = _request(llm, given, params, token_ids, chat)
    _answer(llm, given, params, stream=stream, stats=stats)


@options.grouped
def trace(
    model: options.model("Default: the demo model with its eagle3 head and prompt.") = None,
    prompt: options.PromptText = None,
    model_flag: options.Model = None,
    prompt_file: options.PromptFile = None,
    token_ids: options.TokenIds = None,
    chat: options.Chat = False,
    *,
    engine: options.engine("speculative_config", "dtype", "quantization"),
    html: option(Path | None, "Write a page for a browser, and print only its path.") = None,
    sampling: options.common_sampling(changes={"max_tokens": {"default": 64}}),
) -> None:
    """Continue a prompt and show the draft, its probabilities and the end of every round."""
    model, prompt = options.model_and_prompt(model, prompt, model_flag)
    atomic_files.check_output("--html", html)
    from jspec.api.llm import LLM
    from jspec.api.sampling_params import SamplingParams
    from jspec.cli import demo
    from jspec.tools import trace as tracing
    from jspec.tools.trace import terminal

    if model is None:
        model = demo.ASSETS / "target"
        if engine.speculative_config is None:
            engine = dataclasses.replace(engine, speculative_config=demo.EAGLE3)
        if (prompt, prompt_file, token_ids) == (None, None, None):
            prompt_file = str(demo.PROMPT)
    given = arguments.prompt(prompt, prompt_file, token_ids, chat)
    params = SamplingParams(**sampling)
    with options.busy("loading"):
        llm = LLM(model, **vars(engine))
    given, params = _request(llm, given, params, token_ids, chat)
    with options.busy("compiling and generating"):
        traced = tracing.trace(llm, given, params)
    if html is None:
        Console(highlight=False).print(terminal.page(traced))
    else:
        tracing.save(traced, html)
        if not atomic_files.is_stream(html):
            print(html)


def _request(
    llm: "LLM", given: Any, params: "SamplingParams", token_ids: str | None, chat: bool
) -> tuple[Any, "SamplingParams"]:
    """Return the prompt in the chat template, and parameters that the tokenizer allows."""
    from jspec.cli import show

    if token_ids is not None and show.tokenizer_of(llm) is None:
        params = dataclasses.replace(params, detokenize=False)
    return (arguments.templated(llm, given) if chat else given), params


def _answer(llm: "LLM", given: Any, params: "SamplingParams", *, stream: bool, stats: bool) -> None:
    """Run the request; print its texts, and statistics if ``stats``."""
    from jspec.cli import show

    tokenizer = show.tokenizer_of(llm)
    begin = time.perf_counter()
    with options.busy("compiling and generating"):
        running = llm.stream(given, params) if stream else iter(llm.generate(given, params))
        first = next(running)
    console, shown, end = Console(highlight=False, soft_wrap=True), 0, "" if stream else "\n"
    for request in itertools.chain([first], running):
        for output in request.outputs:
            if params.n > 1:
                print(f"text {output.index + 1} of {params.n}")
            if stats and tokenizer:
                text = show.colored(tokenizer, request.prompt_token_ids, output)
                console.print(text[shown:], end=end)
            else:  # not through the console, which would expand tabs
                text = output.text if tokenizer else ",".join(map(str, output.token_ids))
                print(text[shown:], end=end, flush=True)
            shown = len(text) if stream else 0
    if stream:
        print()
    if stats:
        seconds = time.perf_counter() - begin
        console.print()
        console.print(show.legend())
        for output in request.outputs:
            console.print(show.stats_table(output, seconds))
