"""Every public object has a docstring, its first line is short, and the project's former private words stay away."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
# folders of the packages, and the modules beside them
CLEAN = tuple(
    sorted(
        f"{package.name}/{path.name}"
        for package in SOURCE.glob("paceline*")
        for path in package.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    )
)
MOST_WORDS = 15
# Words that nobody but us uses in this sense -> the field's word.
OWN_WORDS = {
    r"(how )?manieth": "index, position",
    r"addends?": "partial sum",
    r"lone (matrix|matrices)": "unpaired layer",
    r"readers (of|in) (a|the) (plan|mesh|replica)": "data-parallel ranks",
    r"per reader|every reader's|each reader's|a reader's share": "data-parallel rank",
    r"how many there are": "number of …",
    r"the like of": "similar",
    r"shared? out": "shard, partition, distribute",
    r"shares out": "shards, partitions, distributes",
    r"the rest is|and the rest\b(?! of)": "remainder",
    r"beforehand": "before, in advance",
    r"rehears(e|es|ed|al|als|ing)": "dry run, or benchmark",
    r"outer way|mean way": "pseudo-gradient",
}
OWN_NAMES = {"readers": "data_ranks", "READERS": "DATA_AXES", "reader_hosts": "data_rank_hosts"}


def first_sentence(docstring: str) -> str:
    """The text up to the first full stop or the first empty line, on one line."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9)`\"'%][.!?])\s+(?=[A-Z`(\"0-9])", paragraph, maxsplit=1)[0]


def words_of(sentence: str) -> int:
    """The number of words.

    Code in backquotes is one, and what stands in parentheses (shapes, units, sources) is none.
    """
    plain = re.sub(r"`[^`]*`", "code", sentence)
    previous = None
    while previous != plain:
        previous, plain = plain, re.sub(r"\s*\([^()]*\)", "", plain)
    return len([word for word in plain.split() if any(map(str.isalnum, word))])


def problems_of_docstring(docstring: str) -> Iterator[str]:
    """Each rule that a docstring breaks, as text."""
    sentence = first_sentence(docstring)
    if (count := words_of(sentence)) > MOST_WORDS:
        yield f"first sentence has {count} words, not at most {MOST_WORDS}: {sentence!r}"


def problems_of_words(text: str) -> Iterator[str]:
    """Each word of `OWN_WORDS` in a docstring, comment or string, with the field's."""
    for pattern, better in OWN_WORDS.items():
        if found := re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            yield f'"{found[0]}" is our own word; the field says "{better}"'


def problems_of_source(source: str) -> Iterator[tuple[int, str]]:
    """Each broken rule in a module's source, with its line."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            line = node.body[0].lineno
            yield from ((line, problem) for problem in problems_of_docstring(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, problem) for problem in problems_of_words(node.value))
        name = (
            getattr(node, "name", None)
            or getattr(node, "arg", None)
            or getattr(node, "attr", None)
            or getattr(node, "id", None)
        )
        if isinstance(name, str) and name in OWN_NAMES:
            yield getattr(node, "lineno", 1), f'the name "{name}" is our own; here it is "{OWN_NAMES[name]}"'
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], problem) for problem in problems_of_words(token.string))


@pytest.mark.parametrize("folder", CLEAN)
def test_a_clean_folder_stays_clean(folder: str) -> None:
    files = sorted((SOURCE / folder).rglob("*.py")) if (SOURCE / folder).is_dir() else [SOURCE / folder]
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {problem}"
        for path in files
        for line, problem in sorted(problems_of_source(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "docstring",
    [
        "A sentence of many more words than anybody can hold in mind at once while reading on through code.",
    ],
)
def test_a_docstring_with_a_long_first_sentence_is_found(docstring: str) -> None:
    assert len(list(problems_of_docstring(docstring))) == 1


@pytest.mark.parametrize(
    "docstring",
    [
        "FSDP all-gather and reduce-scatter time that compute cannot overlap; 0 with a pipeline.",
        (
            "Average parameters over the replicas every `period` steps (Stich, 2019, arXiv:1805.09767, with all "
            "that is said there of it)."
        ),
        (
            "One rank's place in the mesh.\n\nThis paragraph may take as many words as it needs, for it is not the "
            "first, and it says more."
        ),
        "Off-diagonal entries of a matrix.",
    ],
)
def test_a_plain_docstring_passes(docstring: str) -> None:
    assert not list(problems_of_docstring(docstring))


def test_own_words_are_found_in_names_comments_and_messages() -> None:
    source = 'def f(readers: int) -> str:  # the how manieth\n    return "the weights are addends"\n'
    assert sorted(line for line, _ in problems_of_source(source)) == [1, 1, 2]


if __name__ == "__main__":
    # `python tests/test_language.py FOLDER…` lists what breaks the rules.
    import sys

    for name in sys.argv[1:]:
        for file in sorted((SOURCE / name).rglob("*.py")) if (SOURCE / name).is_dir() else [SOURCE / name]:
            for number, text in sorted(problems_of_source(file.read_text(encoding="utf-8"))):
                print(f"{file.relative_to(SOURCE.parent)}:{number}: {text}")
