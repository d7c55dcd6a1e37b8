"""The page of a trace in a headless browser, if one is installed."""

import re
import struct

import pytest

from jspec.tools.trace import html
from tests import browser
from tests.tools.trace import made

pytestmark = browser.needed
PRESS = '<script>document.dispatchEvent(new KeyboardEvent("keydown", {{key: "{}"}}));</script>'


@pytest.fixture
def browse(tmp_path):
    """Return a function that opens a page from a file and returns its DOM."""
    return lambda page, *options, **settings: browser.opened(page, tmp_path, *options, **settings)


def rounds_shown(document):
    """Return the rounds that are not hidden, and the steps marked as current."""
    sections = re.findall(r'<section class="round" id="round-(\d)"([^>]*)>', document)
    current = re.findall(r'<a href="#round-(\d)"[^>]*aria-current="step"', document)
    return [number for number, rest in sections if "hidden" not in rest], current


@pytest.mark.parametrize(
    ("fragment", "key", "shown"),
    [("", "ArrowRight", "2"), ("#round-3", "ArrowRight", "3"), ("#round-3", "Home", "1")],
)
def test_one_round_is_shown_and_keys_step(browse, fragment, key, shown):
    page = html(made.trace()).replace("</body>", PRESS.format(key) + "</body>")
    assert rounds_shown(browse(page, "--dump-dom", fragment=fragment)) == ([shown], [shown])


@pytest.mark.parametrize("window", ["1000,900", "400,800"])
def test_one_round_the_text_and_its_totals_are_visible(tmp_path, window):
    text = browser.seen(html(made.trace()), tmp_path, fragment="#round-2", window=window)
    assert text.startswith("5 tokens in 3 rounds\n")
    assert "Round 2" in text and "Round 1" not in text and "Round 3" not in text
    assert "once a a a a a" in " ".join(text.split())


def test_pointing_at_a_node_shows_its_details(browse):
    point = "dispatchEvent(new MouseEvent('mouseenter'));</script>"
    point = f"<script>document.querySelector('.node.refused').{point}"
    document = browse(html(made.trace()).replace("</body>", point + "</body>"), "--dump-dom")
    assert re.search(r'class="details full"[^>]*>“a” \(id 7\): refused\.', document)


def test_tokens_that_are_markup_run_nothing(browse):
    run = "document.title = 'run'"
    evil = f'</script><script>{run}</script><img src=x onerror="{run}">'
    document = browse(html(made.trace(evil, evil, evil)), "--dump-dom")
    assert "<title>jspec trace: 5 tokens in 3 rounds</title>" in document
    assert "<img" not in document and document.count("<script>") == 1


def test_a_picture_can_be_taken(browse, tmp_path):
    browse(html(made.trace()), f"--screenshot={tmp_path / 'page.png'}")
    data = (tmp_path / "page.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1000, 900)
    assert len(data) > 10_000  # not blank
