"""The command line of a training script: its options, its errors, its exit code."""

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from training.trainer.errors import TrainingError
from training.trainer.settings import OptionError

Settings = TypeVar("Settings")


def run_command(
    kind: type[Settings],
    run: Callable[[Settings, Sequence[str]], Any],
    argv: Sequence[str] | None,
    *,
    module: str,
    description: str,
) -> int:
    """Parses ``argv`` into ``kind`` and runs it.

    Args:
      kind: a dataclass; fields that are dataclasses lend their own, without a prefix.
      run: called with the settings and the words of the command line.
      argv: None for those of the process.
      module: as in ``python -m training.pretrain``.
      description: what ``--help`` says first.

    Returns:
      The exit code: 0; 1 where training stopped for a reason, 2 on bad input, 130 on Ctrl-C where
      nothing waits for it (as before the first step), with one line on stderr for each.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        run(parse(kind, argv, module=module, description=description), argv)
    except SystemExit as stop:  # --help, or an option that does not exist
        return int(stop.code or 0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; run the same command to resume", file=sys.stderr)
        return 130
    return 0


def parse(kind: type[Settings], argv: Sequence[str], *, module: str, description: str) -> Settings:
    """Settings from the words of a command line.

    Raises:
      OptionError: of a dataclass that refuses its values, as it was raised.
      SystemExit: words that are no options of ``kind``, after they were explained on stderr.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                kind,
                args=argv,
                prog=f"python -m {module}",
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        # tyro frames what a dataclass raised, several lines around one: show the line alone.
        cause: BaseException | None = stop
        while cause is not None:
            if isinstance(cause, OptionError):
                raise cause from None
            cause = cause.__context__
        sys.stderr.write(said.getvalue())
        raise
