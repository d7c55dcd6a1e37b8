"""``python -m jspec`` is the command ``jspec``."""

from jspec.cli.main import main

if __name__ == "__main__":
    main()
