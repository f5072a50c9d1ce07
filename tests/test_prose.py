"""Pages stay short and readable: lengths of sentences, of the README and of the whole documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LONGEST_SENTENCE, MEAN_SENTENCE = 40, 18
README_LINES, DOCS_WORDS = 120, 52_500


def sentences(text: str) -> list[str]:
    """Return the sentences of a page, without code, tables, headings and targets of links."""
    text = re.sub(r"^( *)```.*?^\1```", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( {4}|\||#|!!!|:::).*$", "\n", text, flags=re.MULTILINE)  # indented code, tables, headings
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text)
    parts = [part for each in paragraphs for part in re.split(r"(?<=[.!?])[)*]*\s+(?=[A-Z(*]|code)", each.strip())]
    return [" ".join(part.split()) for part in parts if len(part.split()) > 1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    found = sentences(page.read_text())
    assert [sentence for sentence in found if len(sentence.split()) > LONGEST_SENTENCE] == []
    if found:
        assert sum(len(sentence.split()) for sentence in found) / len(found) <= MEAN_SENTENCE


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_documentation_is_short() -> None:
    assert sum(len(page.read_text().split()) for page in DOCS.rglob("*.md")) <= DOCS_WORDS
