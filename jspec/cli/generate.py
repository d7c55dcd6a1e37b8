"""``jspec generate`` and ``jspec trace``."""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jspec.cli import arguments, options
from jspec.cli.options import option, sampling
from jspec.util import atomic_files, values

if TYPE_CHECKING:  # commands import it when they run, so that --help is fast
    from jspec.api.llm import LLM
    from jspec.api.sampling_params import SamplingParams


@options.grouped
def generate(
    model: Annotated[
        str | None, typer.Argument(help="A local directory, a GGUF file, or a model id on the hub.")
    ] = None,
    prompt: options.PromptText = None,
    model_flag: options.Model = None,
    prompt_file: options.PromptFile = None,
    token_ids: options.TokenIds = None,
    chat: options.Chat = False,
    *,
    engine: options.engine(
        *("speculative_config", "dtype", "max_model_len", "deterministic"),
        helps={
            "max_model_len": "Longest sequence, prompt included.",
            "deterministic": "Equal logits for every batch and draft; slower.",
        },
    ),
    stream: option(bool, "Print the text while it is generated.", "--stream") = False,
    stats: option(bool, "Color drafted tokens; print statistics.", "--stats") = False,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    min_tokens: sampling(int, "Least tokens of a text.") = 0,
    presence_penalty: sampling(float, "-2 to 2.") = 0.0,
    frequency_penalty: sampling(float, "-2 to 2.") = 0.0,
    repetition_penalty: sampling(float, "1 is off.") = 1.0,
    logit_bias: sampling(str | None, 'JSON: {"token id": bias}.') = None,
    bad_words: sampling(list[str] | None, "Forbid a word; may be repeated.") = None,
    stop: sampling(list[str] | None, "End before a string; may be repeated.") = None,
    ignore_eos: sampling(bool, "Continue after the end of a text.", "--ignore-eos") = False,
    n: sampling(int, "Number of texts.", "-n") = 1,
) -> None:
    """Continue a prompt."""
    model, prompt = options.model_and_prompt(model, prompt, model_flag)
    if model is None:
        raise typer.BadParameter("the model is missing; give MODEL or --model.")
    given = arguments.prompt(prompt, prompt_file, token_ids, chat)
    if stream and n > 1:
        raise ValueError(f"--stream prints one text, but -n is {n}; leave one of them out.")
    from jspec.api.llm import LLM
    from jspec.api.sampling_params import SamplingParams

    params = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        bad_words=bad_words,
        logit_bias=arguments.json("--logit-bias", logit_bias, '{"5": -1.5}'),
    )
    with options.busy("loading"):
        args = dataclasses.replace(engine, per_request_stats="detailed" if stats else None)
        llm = LLM(model, **vars(args))
    given, params = _request(llm, given, params, token_ids, chat)
    _answer(llm, given, params, stream=stream, stats=stats)


@options.grouped
def trace(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A local directory, a GGUF file, or a model id on the hub. Default: the demo "
            "model with its eagle3 head and prompt."
        ),
    ] = None,
    prompt: options.PromptText = None,
    model_flag: options.Model = None,
    prompt_file: options.PromptFile = None,
    token_ids: options.TokenIds = None,
    chat: options.Chat = False,
    *,
    engine: options.engine("speculative_config", "dtype"),
    html: option(Path | None, "Write a page for a browser, and print only its path.") = None,
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
) -> None:
    """Continue a prompt and show the draft, its probabilities and the end of every round."""
    model, prompt = options.model_and_prompt(model, prompt, model_flag)
    values.check_output("--html", html)
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
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
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
