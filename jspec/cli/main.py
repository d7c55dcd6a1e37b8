"""The command ``jspec``. No library module sets environment variables."""

import _thread
import io
import os
import signal
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from jspec.cli.bench import bench
from jspec.cli.certify import certify
from jspec.cli.chat import chat
from jspec.cli.generate import generate, trace
from jspec.cli.options import option
from jspec.cli.plan import plan
from jspec.cli.run_batch import run_batch
from jspec.cli.serve import serve
from jspec.cli.tune import tune
from jspec.util.processes import exit_at_once

# transformers reads them at import. Its advice to install torch would mislead: jspec needs none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

_WAS_INTERRUPTED = threading.Event()

app = typer.Typer(
    help="Lossless speculative decoding in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run() -> None:
    """Run ``main`` as a process, which ends at once if it was interrupted or still compiles.

    Threads of a closed server that compile would hold up the usual end for minutes.
    """
    try:
        main()
    except SystemExit as end:
        if not (_WAS_INTERRUPTED.is_set() or _still_compiles()):
            raise
        exit_at_once(end.code)


def main() -> None:
    """Run a command; any bad input is one line on stderr and exit code 2."""
    words = sys.argv[1:]
    debug = "--debug" in words
    for stream in (sys.stdout, sys.stderr):  # a console may lack characters of the text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
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


def _still_compiles() -> bool:
    """Return whether a closed server compiles, after half a second for what is nearly done."""
    compilers = [each for each in threading.enumerate() if each.name.startswith("jspec-compiler")]
    for thread in compilers:
        thread.join(0.5)
    return any(thread.is_alive() for thread in compilers)


def _interrupted(_: int, frame: Any) -> None:
    """Raise KeyboardInterrupt; later, if JAX's garbage collector callback would lose it."""
    if frame is not None and frame.f_code.co_name == "_xla_gc_callback":
        threading.Timer(0.01, _thread.interrupt_main).start()
        return
    _WAS_INTERRUPTED.set()
    raise KeyboardInterrupt


def _complaint(error: Exception) -> str | None:
    """Return one line about bad input; None for other errors."""
    if hasattr(error, "format_message"):  # typer's errors, from its own copy of click or another
        command = error.ctx.command_path if getattr(error, "ctx", None) else "jspec"
        message = f"{error.format_message()} ({command} --help shows the usage)"
    elif isinstance(error, ValueError | OSError):
        message = str(error)
    else:
        return None
    return " ".join(message.split())


def _version(requested: bool) -> None:
    if requested:
        print(f"jspec {metadata.version('jspec-decoding')}")
        raise typer.Exit()


@app.callback()
def _common(
    debug: option(bool, "Show tracebacks of bad input.", "--debug") = False,
    version: option(
        bool, "Print the version.", "--version", callback=_version, is_eager=True
    ) = False,
) -> None:
    del version, debug  # handled by the callback, and by main, which accepts --debug anywhere


def methods() -> None:
    """List the drafting methods and acceptance rules."""
    from jspec.cli import show

    console = Console()
    console.print(show.methods_table())
    console.print(show.rules_table())


def models() -> None:
    """List the models and draft heads at hand: embedded, in packages and in the hub's cache."""
    from jspec.cli import show

    Console().print(show.models_table())


def demo(
    max_tokens: option(int, "Tokens to generate.") = 128,
    repeats: option(int, "Timed runs of each row; the best counts.") = 3,
    assets: option(Path | None, "", hidden=True) = None,
) -> None:
    """Continue a prompt with and without speculation, and compare.

    The embedded model continues a program. SmolLM2 answers a question too, if it is installed.
    """
    from jspec.cli import demo

    demo.run(assets or demo.ASSETS, max_tokens, repeats, Console())


for command in (
    *(chat, generate, models, trace, bench, tune, plan, methods, demo, certify, run_batch),
):
    app.command()(command)
# Flags of vLLM that jspec lacks are refused with a reason.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
