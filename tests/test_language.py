"""The language of docstrings, names and prose, as shared by every folder."""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from functools import cache

import pytest
from markdown_it import MarkdownIt

from tests.house import ROOT, nodes, parsed

CODE = ("jspec", "kernels", "training", "benchmarks", "examples", "tests")
NAMED = ("jspec", "kernels", "training", "benchmarks", "examples", "notebooks")
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "training" / "README.md",
)
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
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
    return [(path.relative_to(ROOT), parsed(path)) for path in paths]


@cache
def docstrings_of(tree):
    """Return (line, text) of every docstring of a file."""
    kinds = (ast.Module, ast.ClassDef, *FUNCTIONS.__args__)
    documented = (node for node in nodes(tree) if isinstance(node, kinds))
    texts = ((getattr(node, "lineno", 1), ast.get_docstring(node)) for node in documented)
    return [(line, text) for line, text in texts if text]


@cache
def docstrings():
    """Return (where, text) of every docstring."""
    return [
        (f"{path}:{line}", text) for path, tree in trees(CODE) for line, text in docstrings_of(tree)
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


@cache
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
        for name in {path.stem, *(name for node in nodes(tree) for name in defined(node))}
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


# Habits that the style guide drops, and how often each folder still has them. A count may fall, and
# then falls here too; it never rises.
CEILINGS: dict[str, dict[str, int]] = {
    "packed calls": {
        "tests": 44,
    },
    "lambdas used once": {
        "tests": 60,
    },
    "comments that finish a name": {},
    "verbs of persons": {
        "tests": 7,
    },
    "long parts": {
        "tests": 9,
    },
}
FINISHES_A_NAME = r"(of|that|which|whose|who|with|than)\b"
PERSONS = r"""\b(nobody('s)?|believe[sd]?|hope[sd]?|doubt(s|ed|ful)?|news|hears?|heard|tells?|told
|knows?|known|wants?|wanted|forgets?|forgotten|remembers?
|(rows?|sequences?|pages?|tokens?)\ leaves?)\b"""
LINES_OF_CLASS, LINES_OF_FUNCTION, LINES_OF_FILE, LINES_OF_ENGINE = 320, 80, 450, 320


@cache
def assigned(scope):
    """Return the values of names that a scope assigns once, and the loads of every name in it."""
    values, stores, loads = {}, Counter(), defaultdict(list)
    for node in ast.walk(scope):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                loads[node.id].append(node)
            else:
                stores[node.id] += 1
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            [target], value = node.targets, node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = zip(target.elts, value.elts, strict=False)
            values |= {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
    return {name: value for name, value in values.items() if stores[name] == 1}, loads


def packed_calls(tree):
    """Return the lines of tuples, lists and dicts that a function makes only to spread them."""
    calls = [node for node in nodes(tree) if isinstance(node, ast.Call)]
    spread = {id(x.value) for call in calls for x in call.args if isinstance(x, ast.Starred)}
    spread |= {id(x.value) for call in calls for x in call.keywords if x.arg is None}
    lines = set()
    functions = [node for node in nodes(tree) if isinstance(node, FUNCTIONS)]
    for function in functions if spread else []:
        values, loads = assigned(function)
        for name, value in values.items():
            is_display = isinstance(value, ast.Tuple | ast.List)
            is_display |= isinstance(value, ast.Dict) and len(loads[name]) == 1
            if is_display and loads[name] and all(id(node) in spread for node in loads[name]):
                lines.add(value.lineno)
    return sorted(lines)


def lambdas_used_once(tree):
    """Return the lines of lambdas that have a name and are used once."""
    return sorted(
        {
            value.lineno
            for scope in nodes(tree)
            if isinstance(scope, FUNCTIONS | ast.Module)
            for values, loads in [assigned(scope)]
            for name, value in values.items()
            if isinstance(value, ast.Lambda) and len(loads[name]) == 1
        }
    )


@cache
def comments(source):
    """Return (line, text) of every comment; lines that follow each other are one."""
    blocks, last = [], None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, column), text = token.start, token.string.lstrip("#: ")
            if last == (line - 1, column):
                blocks[-1] = blocks[-1][0], f"{blocks[-1][1]} {text}"
            else:
                blocks.append((line, text))
            last = line, column
    return blocks


def prose_of(source, tree):
    """Return (line, text) of comments and docstrings, without code."""
    texts = comments(source) + docstrings_of(tree)
    return [(line, re.sub(r"``.*?``|`.*?`", "", text, flags=re.S)) for line, text in texts]


def long_parts(source, tree, path=""):
    """Return the lines of files, classes and functions that are too long."""
    most = LINES_OF_ENGINE if str(path).startswith("jspec/engine") else LINES_OF_FILE
    limits = {ast.ClassDef: LINES_OF_CLASS}
    return [1] * (source.count("\n") > most) + [
        node.lineno
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef | FUNCTIONS)
        and node.end_lineno - node.lineno >= limits.get(type(node), LINES_OF_FUNCTION)
    ]


def found(rule, source, tree, path=""):
    """Return the lines of a file that break a rule of ``CEILINGS``."""
    if rule == "packed calls":
        return packed_calls(tree)
    if rule == "lambdas used once":
        return lambdas_used_once(tree)
    if rule == "comments that finish a name":
        return [line for line, text in comments(source) if re.match(FINISHES_A_NAME, text)]
    if rule == "verbs of persons":
        return [
            line
            for line, text in prose_of(source, tree)
            for _ in re.finditer(PERSONS, text, re.I | re.X)
        ]
    return long_parts(source, tree, path)


def room_of(path):
    """Return the folder whose ceiling counts for a file."""
    return "/".join(path.parts[: 2 if path.parts[0] == "jspec" and len(path.parts) > 2 else 1])


@pytest.mark.parametrize("rule", CEILINGS)
def test_habits_of_the_first_years_only_get_rarer(rule):
    places = defaultdict(list)
    for path, tree in trees(CODE):
        lines = found(rule, (ROOT / path).read_text(encoding="utf-8"), tree, path)
        places[room_of(path)] += [f"{path}:{line}" for line in lines]
    counts = CEILINGS[rule]
    assert {room: lines for room, lines in places.items() if len(lines) > counts.get(room, 0)} == {}


@pytest.mark.parametrize(
    ("rule", "broken", "kept"),
    [
        (
            "packed calls",
            "def f(a):\n    pair = a, 1\n    return g(*pair)",
            "def f(*a):\n    pair = a, 1\n    return g(*a, pair)",
        ),
        (
            "lambdas used once",
            "def f(a):\n    twice = lambda x: 2 * x\n    return twice(a)",
            "def f(a):\n    return map(lambda x: 2 * x, a)",
        ),
        ("comments that finish a name", "count = 0  # of pages", "pages = 0  # number of pages"),
        ("verbs of persons", "# A page is known.", "# A page is cached."),
        ("long parts", "def f():" + "\n    x = 1" * 80, "def f():" + "\n    x = 1" * 79),
    ],
)
def test_each_habit_is_found(rule, broken, kept):
    assert len(found(rule, broken, ast.parse(broken))) == 1
    assert found(rule, kept, ast.parse(kept)) == []
