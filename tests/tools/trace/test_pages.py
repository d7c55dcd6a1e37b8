"""The page and the terminal view of a trace are complete, well formed and safe for any token."""

import dataclasses
import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from jspec.tools.trace import frame, html, page, save, terminal
from tests.tools.trace import made

EVIL = (
    "</script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "{{ 7 }}{% raw %}",
    "&lt;b&gt;&#0;",
    "]]><!--",
    "\x00\x1b[2J\x07\x9b31m",
    "\u202egnp.exe\u2066",
    "\ud800 \ufffe",
)
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Parsed(HTMLParser):
    """The tags and the text of a page, whose tags must be closed in order."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.open, self.text = [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        assert len({name for name, _ in attrs}) == len(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def printed(trace):
    console = Console(file=io.StringIO(), width=100, highlight=False)
    console.print(terminal.page(trace))
    return console.file.getvalue()


def test_the_page_needs_nothing_from_outside():
    page = Parsed(html(made.trace()))
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(page.tags)
    assert page.tags.count("script") == 1
    links = [value for name, value in page.attributes if name in ("href", "src", "xlink:href")]
    assert links and all(re.fullmatch(r"#round-\d+", link) for link in links)
    assert not re.search(r"https?://|@import|url\(", html(made.trace()))
    assert page.tags.count("section") == 3


@pytest.mark.parametrize("evil", EVIL)
def test_no_token_can_become_a_part_of_the_page(evil):
    page, plain = html(made.trace(evil, evil, evil)), html(made.trace())
    assert Parsed(page).tags == Parsed(plain).tags
    script = re.compile("<script>(.*?)</script>", re.DOTALL)
    assert script.findall(page) == script.findall(plain)
    page.encode()  # no half of a surrogate pair


@pytest.mark.parametrize("evil", ["\x00\x1b[2J\x07\x9b31m\r", "\u202e\ud800"])
def test_no_token_can_control_a_terminal_or_reverse_a_text(evil):
    named = made.trace(evil, evil, evil)
    for shown in (html(named), printed(named)):
        assert not [char for char in shown if not char.isprintable() and char not in "\n\u2002"]
    assert evil.encode("unicode_escape", "surrogatepass").decode() in printed(named)


def test_page_and_terminal_show_probabilities_uniforms_and_reasons():
    page, text = "".join(Parsed(html(made.trace())).text), printed(made.trace())
    details = [
        value for name, value in Parsed(html(made.trace())).attributes if name == "aria-label"
    ]
    assert any("uniform 0.875, not below it: refused" in words for words in details)
    assert any("A deterministic draft has no q" in words for words in details)
    assert "p .25\u2002q .50" in page and "Why it ended: refused “a”." in page
    assert "a  p 0.250  q 0.500  uniform 0.875 ≥ 0.500  refused" in text
    assert "a  p 0.250  corrected" in text and "a  p 0.250  bonus" in text
    for shown in (page, text):
        assert "5, 2 drafted, 1 bonus, 1 corrected, 1 plain" in re.sub(r"\s+", " ", shown)
        assert "100 0" in shown  # accepted by position


def test_the_page_is_the_same_text_with_every_piece_leading_to_its_round(tmp_path):
    trace = made.trace(text="<é>\n")
    save(trace, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "".join(re.findall(r'title="[^"]*round \d+">(.*?)</a>', page, re.DOTALL)) == (
        "&lt;é&gt;\n" * 5
    )
    assert re.findall(r'class="piece (\w+)" href="#round-(\d)"', page) == [
        ("drafted", "1"),
        ("corrected", "1"),
        ("drafted", "2"),
        ("bonus", "2"),
        ("plain", "3"),
    ]


def test_a_notebook_gets_the_page_in_a_frame():
    [source] = [value for name, value in Parsed(frame(made.trace())).attributes if name == "srcdoc"]
    assert source == html(made.trace())


def test_every_box_is_drawn_behind_that_of_its_parent():
    """With the target's own token after the last accepted node; ``up`` counts levels to close."""
    drawn = [(box["kind"], box["up"]) for box in page._tree(made.trace().rounds[0])]
    assert drawn == [
        ("root", None),
        ("refused", None),
        ("not-reached", 1),
        ("accepted", None),
        ("refused", 0),
        ("corrected", 2),
    ]


def test_a_long_chain_can_be_drawn():
    trace = made.trace()
    chain = tuple(made.node(index, index - 1, index, "a", "accepted") for index in range(1024))
    long = dataclasses.replace(trace.rounds[0], nodes=chain, pieces=())
    drawn = html(dataclasses.replace(trace, rounds=(long,)))
    assert Parsed(drawn).attributes.count(("class", "children")) == 1023
