"""Plain words in code and documentation, and links that lead somewhere."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("benchmarks", "cdc", "demo", "migrations", "sinks", "spark_pipeline", "walbrook")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# Words that a reader cannot search for, each with what to write in its place.
WORDS = {
    r"\banew\b": "again, or the verb with re-: reopen, rebuild, reset",
    r"\bwho(?:so)?ever\b": "the noun: the reader, the caller, the process",
    r"\b(?:some|no|any|every)body\b": "the noun: a reader, no worker, an operator",
    r"\bfor ever\b": "forever, or the bound that there is",
    r"\bin silence\b": "silently",
    r"\btold\b": "notified, reported, recorded, distinguished",
    r"\b(?:courier|desk|errand|hunt(?:ed|s|ing)?)\b": "sender, delivery, search",
    r"\b(?:strikes?|standings?)\b": "refusals in a row, saved position",
    r"\bput(?:s|ting)? (?:\w+ )?aside\b": "queued for a retry",
    r"\blanes?\b": "worker, stage or feed",
    r"\bthe answer (?:is|are)\b": "Returns …",
    r"\b(?:says?|tells?) whether\b": "Returns True if …, or the noun",
    r"\bwhat must always hold\b": "Invariant:",
    r"\b(?:a|one) (?:row|module|reader|worker|request|line|number) an? \w+": "one row per …",
    r"\b(?:a|one) (?:file|column|class|job|task) an? \w+": "one file per …",
}


def prose_of(path: Path) -> str:
    """Docstrings and comments; error texts and SQL are left out."""
    text = path.read_text()
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found += [said for statement in node.body if (said := _string(statement))]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found.append(token.string.lstrip("# "))
    return " ".join("\n".join(found).split())


def _string(statement: ast.stmt) -> str | None:
    """A docstring, of a module, a class, a function or the constant before it."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None


@cache
def texts() -> list[tuple[Path, str]]:
    """Prose of code and pages; the changelog is history."""
    found = [(path, prose_of(path)) for room in CODE for path in (ROOT / room).rglob("*.py")]
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    return found + [(page, " ".join(page.read_text().split())) for page in pages]


@pytest.mark.parametrize("pattern", WORDS)
def test_words_that_a_reader_cannot_search_for_are_not_used(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: …{text[max(0, match.start() - 30) : match.end() + 30]}…"
        for path, text in texts()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]
    assert not found, f"instead write: {WORDS[pattern]}"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    found: Counter[str] = Counter()
    names = set()
    fenced = False
    for line in page.read_text().splitlines():
        fenced ^= line.lstrip().startswith("```")
        heading = re.match(r"#{1,6} +(.*?)\s*#*$", line)
        if fenced or not heading:
            continue
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        names.add(slug if not found[slug] else f"{slug}-{found[slug]}")
        found[slug] += 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(
        r"`((?:cdc|sinks|spark_pipeline|demo|migrations|tests)/[\w/.*]+)`", page.read_text()
    ):
        base = name.rstrip("/")
        places = [base, f"{base}.py", f"{base.rpartition('.')[0]}.py"]
        assert any(list(ROOT.glob(place)) for place in places if place), f"{name} does not exist"


def test_the_modules_that_prose_names_exist() -> None:
    for room in CODE:
        for path in (ROOT / room).rglob("*.py"):
            for name in re.findall(
                r"``((?:cdc|sinks|spark_pipeline|demo)\.[\w.]+)``", prose_of(path)
            ):
                place = ROOT / name.replace(".", "/")
                parent = place.parent
                known = (
                    place,
                    place.with_suffix(".py"),
                    parent.with_suffix(".py"),
                    parent / "__init__.py",
                )
                assert any(option.exists() for option in known), f"{path} names {name}"
