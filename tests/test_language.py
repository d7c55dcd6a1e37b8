"""The language of docstrings, names and prose, as shared by every folder."""

import ast
import re
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
CODE = ("jspec", "kernels", "training", "benchmarks", "examples", "tests")
NAMED = ("jspec", "kernels", "training", "benchmarks", "examples", "notebooks")
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "training" / "README.md",
)
OPENERS = r"(What|Whether|Which|Of|How|Who|Whoever|Where|Those|But)\b"
# Words of the glossary's left column: in no part of a name, as no whole name, in no prose.
PARTS = """law laws coin coins warp warps warped warping absorb absorbs absorbed retire retired
retires rung rungs ladder gear gears geared lawful unlawful job jobs assembly assemblies shaping
topology contracts naming calibration iid"""
NAMES = "said own kept found lost place places level levels stays shift points_last pruned"
PROSE = "laws?|coins?|warp(s|ed|ing)?|rungs?|ladders?|gears?|lawful|absorb(s|ed)?"


@cache
def trees(folders):
    """Return the path below the root and the syntax tree of every Python file."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def docstrings():
    """Return (where, text) of every docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (f"{path}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node))
        for path, tree in trees(CODE)
        for node in ast.walk(tree)
        if isinstance(node, kinds) and ast.get_docstring(node)
    ]


def defined(node):
    """Return the names that a node of a syntax tree defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.alias):
        return [node.asname] if node.asname else []
    return []


def is_in_glossary(name):
    """Return whether a name is, or has a part that is, in the glossary's left column."""
    parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    return name.lower() in NAMES.split() or bool(parts & set(PARTS.split()))


@cache
def paragraphs():
    """Return (where, text) of the paragraphs of every page: no tables, no blocks of code.

    Inline code is one word, a link is its text.
    """
    texts = []
    for page in PAGES:
        tokens = MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))
        in_table = False
        for token in tokens:
            in_table = token.type == "table_open" or (in_table and token.type != "table_close")
            if token.type == "inline" and not in_table:
                words = {"text": lambda part: part.content, "code_inline": lambda _: "CODE"}
                text = "".join(words.get(part.type, lambda _: " ")(part) for part in token.children)
                # Emphasis leaves a blank before punctuation.
                text = re.sub(r"\s+([.,:;?!)])", r"\1", text)
                texts.append((f"{page.relative_to(ROOT)}:{token.map[0] + 1}", text))
    return texts


def long_lines(page):
    """Return the lines of a page over 120 characters, without tables and blocks of code."""
    lines, in_code = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        in_code ^= line.startswith("```")
        if len(line) > 120 and not in_code and not line.startswith("|"):
            lines.append(f"{page.relative_to(ROOT)}:{number}")
    return lines


def test_no_docstring_opens_with_a_clause():
    assert [where for where, text in docstrings() if re.match(OPENERS, text)] == []


def test_first_lines_of_docstrings_are_short_sentences():
    firsts = [(where, text.split("\n")[0]) for where, text in docstrings()]
    assert [where for where, line in firsts if len(line) > 100 or not line.endswith(".")] == []


def test_docstrings_use_the_words_of_the_field():
    prose = [(where, re.sub(r"``.*?``", "", text)) for where, text in docstrings()]
    assert [where for where, text in prose if re.search(rf"\b({PROSE})\b", text)] == []


def test_no_name_is_in_the_glossarys_left_column():
    uses = {
        f"{path}: {name}"
        for path, tree in trees(NAMED)
        for node in ast.walk(tree)
        for name in [path.stem, *defined(node)]
        if is_in_glossary(name)
    }
    assert sorted(uses) == []


def test_pages_use_the_words_of_the_field():
    assert [w for w, text in paragraphs() if re.search(rf"\b({PROSE})\b", text, re.I)] == []


def test_no_sentence_of_a_page_has_more_than_30_words():
    long = [
        f"{where}: {sentence[:60]}"
        for where, text in paragraphs()
        for sentence in re.split(r"(?<=[.?!])[\"')]*\s+", text)
        if len(sentence.split()) > 30
    ]
    assert long == []


def test_lines_of_pages_have_at_most_120_characters():
    assert [where for page in PAGES for where in long_lines(page)] == []


def test_the_changelog_has_one_line_an_entry_under_four_headings():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    headings = {line for line in lines if line.startswith("### ")}
    assert headings <= {"### Added", "### Changed", "### Removed", "### Fixed"}
    assert [line for line in lines if len(line) > 160 or line.startswith(" ")] == []
