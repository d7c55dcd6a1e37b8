"""A headless browser for tests of the HTML pages that jspec writes; optional."""

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
# Stores the visible text of the loaded page.
_READ = "<script>document.body.dataset.seen = document.body.innerText;</script>"


def opened(page, folder, *options, fragment="", window="1000,900"):
    """Open a page from a file, check that the console stays empty, and return the output."""
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
    # Script errors and violations of the content policy appear on the console.
    assert "CONSOLE" not in log, log
    return ran.stdout.decode()


def seen(page, folder, **settings):
    """Return the visible text of a page, without hidden or folded parts."""
    document = opened(page + _READ, folder, "--dump-dom", **settings)
    return html.unescape(re.search(r'<body[^>]* data-seen="([^"]*)"', document)[1])
