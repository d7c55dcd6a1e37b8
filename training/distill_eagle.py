"""Short form of ``python -m training.distill eagle``."""

import sys
from collections.abc import Sequence

from training import distill


def main(argv: Sequence[str] | None = None) -> int:
    """Run the method ``eagle``; see ``run_command`` for the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    return distill.run_method("eagle", argv, "training.distill_eagle")


if __name__ == "__main__":
    sys.exit(main())
