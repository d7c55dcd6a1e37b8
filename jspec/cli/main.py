"""The command ``jspec``. Only here is the environment set or read, and only here noise silenced."""

import _thread
import contextlib
import dataclasses
import itertools
import os
import signal
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jspec.cli import arguments
from jspec.cli.bench import bench
from jspec.cli.tune import tune
from jspec.util import atomic_files, values

if TYPE_CHECKING:  # the commands import it when they run, so that --help is quick
    from jspec.api.llm import LLM
    from jspec.api.sampling_params import SamplingParams

# Read by transformers when it is imported. jspec needs no torch, so its advice would only mislead.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

app = typer.Typer(
    help="Lossless speculative decoding in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_SAMPLING = {"rich_help_panel": "Sampling"}
_MODEL = {"rich_help_panel": "Of a model"}


def _version(asked: bool) -> None:
    if asked:
        print(f"jspec {metadata.version('jspec-decoding')}")
        raise typer.Exit()


# What commands that continue one prompt have in common.
_PromptText = Annotated[str | None, typer.Argument(help="Text to continue.")]
_PromptFile = Annotated[
    str | None, typer.Option(help="File with the prompt; - for standard input.")
]
_Chat = Annotated[
    bool, typer.Option("--chat", help="The prompt is a message, for the model's chat template.")
]
_TokenIds = Annotated[str | None, typer.Option(help='The prompt as token ids: "1,2,3".')]
_Config = Annotated[str | None, typer.Option(help="JSON, vLLM's keys.")]
_Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
_MaxTokens = Annotated[int, typer.Option(**_SAMPLING)]
_Temperature = Annotated[float, typer.Option(help="0 is greedy.", **_SAMPLING)]
_TopP = Annotated[float, typer.Option(**_SAMPLING)]
_TopK = Annotated[int, typer.Option(help="0 keeps all.", **_SAMPLING)]
_MinP = Annotated[float, typer.Option(**_SAMPLING)]
_Seed = Annotated[int | None, typer.Option(**_SAMPLING)]


def main() -> None:
    """Runs a command; bad input of every kind is one line on stderr and exit code 2."""
    words = sys.argv[1:]
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        sys.exit(app(words, prog_name="jspec", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        message = _complaint(error)
        if debug or message is None:
            raise
        print(f"jspec: {message}", file=sys.stderr)
        sys.exit(2)


def _interrupted(_: int, frame: Any) -> None:
    """As Python's own; but what JAX calls when garbage is collected would lose the exception."""
    if frame is not None and frame.f_code.co_name == "_xla_gc_callback":
        threading.Timer(0.01, _thread.interrupt_main).start()
        return
    raise KeyboardInterrupt


def _complaint(error: Exception) -> str | None:
    """One line about bad input; None for what is no fault of the input."""
    if hasattr(error, "format_message"):  # typer's, whichever click it carries
        command = error.ctx.command_path if getattr(error, "ctx", None) else "jspec"
        message = f"{error.format_message()} ({command} --help shows the usage)"
    elif isinstance(error, ValueError | OSError):
        message = str(error)
    else:
        return None
    return " ".join(message.split())


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of bad input.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which this is.")
    ] = False,
) -> None:
    del version, debug  # one is said by its callback, one taken by main: it may stand anywhere


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A local directory, or a model id on the hub.")],
    prompt: _PromptText = None,
    prompt_file: _PromptFile = None,
    token_ids: _TokenIds = None,
    chat: _Chat = False,
    speculative_config: _Config = None,
    dtype: _Dtype = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence, prompt included.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Equal logits in passes of any size; slower.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print as it comes.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Color what was drafted; print statistics.")
    ] = False,
    max_tokens: _MaxTokens = 128,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    top_k: _TopK = 0,
    min_p: _MinP = 0.0,
    seed: _Seed = None,
    min_tokens: Annotated[
        int, typer.Option(help="Tokens before the text may end.", **_SAMPLING)
    ] = 0,
    presence_penalty: Annotated[float, typer.Option(help="-2 to 2.", **_SAMPLING)] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="-2 to 2.", **_SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.", **_SAMPLING)] = 1.0,
    logit_bias: Annotated[
        str | None, typer.Option(help='JSON: {"token id": bias}.', **_SAMPLING)
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option(help="Never say it; may be repeated.", **_SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before it; may be repeated.", **_SAMPLING)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", **_SAMPLING)] = False,
    n: Annotated[int, typer.Option("-n", help="How many texts.", **_SAMPLING)] = 1,
) -> None:
    """Continue a prompt."""
    given = arguments.prompt(prompt, prompt_file, token_ids, chat)
    config = arguments.json(
        "--speculative-config",
        speculative_config,
        '{"method": "ngram", "num_speculative_tokens": 4}',
    )
    if stream and n > 1:
        raise ValueError(f"--stream prints one text, but -n is {n}; leave one of them out.")
    from jspec.api.llm import LLM
    from jspec.api.sampling_params import SamplingParams
    from jspec.cli import show

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
    with _busy("loading"):
        llm = LLM(
            model,
            config,
            dtype=dtype,
            max_model_len=max_model_len,
            per_request_stats="detailed" if stats else None,
            deterministic=deterministic,
        )
    if token_ids is not None and show.tokenizer_of(llm) is None:
        params = dataclasses.replace(params, detokenize=False)
    given = arguments.templated(llm, given) if chat else given
    _answer(llm, given, params, stream=stream, stats=stats)


@app.command()
def trace(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A local directory, or a model id on the hub; if left out, the embedded "
            "one with its eagle3 head, on a prompt of ours."
        ),
    ] = None,
    prompt: _PromptText = None,
    prompt_file: _PromptFile = None,
    token_ids: _TokenIds = None,
    chat: _Chat = False,
    speculative_config: _Config = None,
    dtype: _Dtype = "auto",
    html: Annotated[
        Path | None, typer.Option(help="Write one page for a browser, and print nothing else.")
    ] = None,
    max_tokens: _MaxTokens = 64,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    top_k: _TopK = 0,
    min_p: _MinP = 0.0,
    seed: _Seed = None,
) -> None:
    """Continue a prompt and show every round: what was drafted, how likely, and why it stopped."""
    config = arguments.json(
        "--speculative-config",
        speculative_config,
        '{"method": "ngram", "num_speculative_tokens": 4}',
    )
    values.check_output("--html", html)
    from jspec.api.llm import LLM
    from jspec.api.sampling_params import SamplingParams
    from jspec.cli import demo, show
    from jspec.tools import trace as tracing
    from jspec.tools.trace import terminal

    if model is None:
        model = demo.ASSETS / "target"
        config = demo.EAGLE3 if speculative_config is None else config
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
    with _busy("loading"):
        llm = LLM(model, config, dtype=dtype)
    if token_ids is not None and show.tokenizer_of(llm) is None:
        params = dataclasses.replace(params, detokenize=False)
    with _busy("compiling and generating"):
        traced = tracing.trace(llm, arguments.templated(llm, given) if chat else given, params)
    if html is None:
        Console(highlight=False).print(terminal.page(traced))
    else:
        tracing.save(traced, html)
        if not atomic_files.is_stream(html):
            print(html)


app.command()(bench)
app.command()(tune)


@app.command()
def methods() -> None:
    """List the drafting methods and acceptance rules."""
    from jspec.cli import show

    console = Console()
    console.print(show.methods_table())
    console.print(show.rules_table())


@app.command()
def demo(
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs a row, of which the best counts.")] = 3,
    assets: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Continue a prompt with the embedded model, with and without speculation, and compare."""
    from jspec.cli import demo

    demo.run(assets or demo.ASSETS, max_tokens, repeats, Console())


@app.command()
def certify(
    rule: Annotated[
        list[str] | None,
        typer.Option(help="A rule, or the dotted path of yours; may be repeated. All if left out."),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Of the compiled rule's rounds; 16 if left out.")
    ] = None,
    tree: Annotated[
        str | None, typer.Option(help='Of the enumerated drafts, parents: "-1,0,0,1".')
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Certify a model as it runs, a local directory or a hub id.", **_MODEL),
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(help="JSON, vLLM's keys.", **_MODEL)
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="May be repeated; a few of ours if none.", **_MODEL)
    ] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(help="File with one prompt; - for standard input; may be repeated.", **_MODEL),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="To continue each prompt by; 64 if left out.", **_MODEL)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16 or float16.", **_MODEL)
    ] = None,
    num_drafts: Annotated[
        int | None, typer.Option(help="To count draws of; 4096 if left out.", **_MODEL)
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="As of jspec generate.", **_MODEL)
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="More than 0; of a model 0.8 if left out.", **_SAMPLING)
    ] = None,
    top_p: Annotated[float | None, typer.Option(**_SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps all.", **_SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option(**_SAMPLING)] = None,
    seed: Annotated[int, typer.Option(**_SAMPLING)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the findings here as well.")
    ] = None,
) -> None:
    """Prove that speculation leaves the target's distribution alone; exit code 1 if not."""
    config = arguments.json(
        "--speculative-config",
        speculative_config,
        '{"method": "ngram", "num_speculative_tokens": 4}',
    )
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


def _answer(llm: "LLM", given: Any, params: "SamplingParams", *, stream: bool, stats: bool) -> None:
    """Runs the request and prints its texts, and statistics where they are wanted."""
    from jspec.cli import show

    tokenizer = show.tokenizer_of(llm)
    begin = time.perf_counter()
    with _busy("compiling and generating"):
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
            else:  # as it is: a console would expand tabs
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


def _busy(words: str) -> contextlib.AbstractContextManager:
    """A spinner on stderr, so that stdout holds the text alone."""
    return Console(stderr=True).status(words)
