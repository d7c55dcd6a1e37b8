"""The command line of a training script: options, errors and exit codes."""

import contextlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tyro

from jspec.util.processes import exit_at_once
from training.util.errors import OptionError, Stopped, TrainingError, file_error

Settings = TypeVar("Settings")
_SIGNAL = 128  # exit codes above it are those of signals


def run_command(
    kind: type[Settings],
    run: Callable[[Settings, Sequence[str]], Any],
    argv: Sequence[str] | None = None,
    *,
    module: str,
    description: str,
) -> int:
    """Parse ``argv`` into the dataclass ``kind`` and run it; errors become one line on stderr.

    The fields of its dataclass fields are options without a prefix. ``run`` gets the settings and
    the words of the command line, by default those of the process. ``module`` is as in
    ``python -m training.pretrain``, ``description`` the first paragraph of ``--help``.

    Returns:
      The exit code: 0, 1 if training stopped for a reason, 2 on bad input, 130 on Ctrl-C, 143 on
      SIGTERM.
    """
    argv, settings = list(sys.argv[1:] if argv is None else argv), None
    try:
        settings = parse(kind, argv, module=module, description=description)
        with _terminable():
            run(settings, argv)
    except SystemExit as stop:  # --help, or an unknown option
        return int(stop.code or 0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {file_error(error, settings)}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        stop = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
        if str(stop):
            print(stop, file=sys.stderr)
        return stop.exit_code
    return 0


def end(code: int) -> None:
    """End the process with the code of ``run_command``: at once after a signal."""
    if code > _SIGNAL:
        exit_at_once(code)
    sys.exit(code)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Raise ``Stopped`` on SIGTERM, so that locks and unfinished files are removed."""

    def stop(number: int, _):
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():  # it cannot handle signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parse(kind: type[Settings], argv: Sequence[str], *, module: str, description: str) -> Settings:
    """Return the settings that ``argv`` describes.

    Raises:
      OptionError: a dataclass refuses its values.
      SystemExit: ``argv`` holds unknown options; stderr explains them.
    """
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(
                kind,
                args=argv,
                prog=f"python -m {module}",
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        # tyro frames an error of a dataclass in several lines: raise the original instead.
        cause: BaseException | None = stop
        while cause is not None:
            if isinstance(cause, OptionError):
                raise cause from None
            cause = cause.__context__
        sys.stderr.write(messages.getvalue())
        raise
