"""``python -m jspec`` is the command ``jspec``."""

from jspec.cli import main

if __name__ == "__main__":
    main()
