"""A real browser, headless, for the pages that jspec writes: where there is one."""

import html
import re
import shutil
import subprocess

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needed = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser was found: none of {', '.join(NAMES)} is in PATH"
)
# Whatever is seen of the page, once it stands still.
_READ = "<script>document.body.dataset.seen = document.body.innerText;</script>"


def opened(page, folder, *options, fragment="", window="1000,900"):
    """Opens a page from a file, with a console that stays empty; returns what was printed."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--window-size={window}",
        f"--user-data-dir={folder / 'user'}",
        *options,
        f"{file.as_uri()}{fragment}",
    ]
    ran = subprocess.run(command, capture_output=True, timeout=120)
    log = ran.stderr.decode(errors="replace")
    assert ran.returncode == 0, log
    # What a script complains of, or what its policy forbids, is said on the console.
    assert "CONSOLE" not in log, log
    return ran.stdout.decode()


def seen(page, folder, **settings):
    """The text that a reader sees: what is hidden or folded is not in it."""
    document = opened(page + _READ, folder, "--dump-dom", **settings)
    return html.unescape(re.search(r'<body[^>]* data-seen="([^"]*)"', document)[1])
