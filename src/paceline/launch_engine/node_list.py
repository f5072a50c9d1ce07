"""Slurm's short form of a list of nodes: `n[01-03,7],m1` is n01, n02, n03, n7, m1."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from paceline.errors import LaunchError
from paceline.launch_engine.variables import MOST_HOSTS

_ENTRY = re.compile(r"((?:[^\[\],\s]|\[[0-9,-]+\])+)(?:,|$)")  # names and brackets; commas outside of them separate
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def expand(text: str) -> list[str]:
    """The names in a list of nodes, in its order.

    Raises:
        LaunchError: it is no such list, or names more than `MOST_HOSTS` nodes.
    """
    names: list[str] = []
    position = 0
    while position < len(text) or not text:
        entry = _ENTRY.match(text, position)
        if entry is None:
            raise _not_a_list(text)
        position = entry.end()
        parts = [list(_part(match, text)) for match in _PART.finditer(entry[1])]
        if len(names) + math.prod(map(len, parts)) > MOST_HOSTS:
            raise LaunchError(f'The node list "{text[:80]}" names more than {MOST_HOSTS} nodes.')
        names += map("".join, itertools.product(*parts))
    if text.endswith(","):
        raise _not_a_list(text)
    return names


def _part(match: re.Match[str], text: str) -> Iterator[str]:
    """The alternatives of one part of a name: a text, or the numbers in brackets."""
    if match[2] is not None:
        yield match[2]
        return
    total = 0
    for word in match[1].split(","):
        numbers = _RANGE.fullmatch(word)
        first, last = (numbers[1], numbers[2] or numbers[1]) if numbers else ("1", "0")
        total += int(last) - int(first) + 1
        if int(last) < int(first) or total > MOST_HOSTS:
            raise _not_a_list(text)
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _not_a_list(text: str) -> LaunchError:
    return LaunchError(f'"{text[:80]}" is no list of nodes such as n[01-03,7],m1, or is too long.')
