"""``python -m jspec`` is the command ``jspec``."""

from jspec.cli.main import run

if __name__ == "__main__":
    run()
