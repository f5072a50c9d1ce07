"""Graph of a recorded forward pass as plain data.

Tensors, operations, module calls and Python calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal

Kind = Literal["parameter", "input", "constant", "result"]
Shapes = Mapping[str, tuple[int, ...]]
# operations of a graph whose backward pass is the model's own code
UNSEEN_GRADIENT = ("hook", "function")


@dataclass
class Graph:
    """A trace of a model.

    Attributes:
        outputs: the tensors of the model's result.
        opaque: path of each opaque module -> reason.
        logits: the result itself if it is a tensor, else its `logits`, or None.
    """

    values: list[TracedTensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    calls: list[PythonCall] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    logits: int | None = None


@dataclass
class TracedTensor:
    """A tensor of the trace.

    Attributes:
        floating: True for floating point or complex numbers, which can have a gradient.
        name: a parameter's name in the model.
        uses: (node, slot), the slots counted over the node's inputs.
    """

    shape: tuple[int, ...]
    kind: Kind
    floating: bool
    name: str = ""
    producer: int = -1
    requires_grad: bool = False
    uses: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Node:
    """An operation: an ATen overload, or `linear`, `embedding` (leaf modules) or `opaque`.

    `args` holds `Ref`s in place of tensors.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[int]
    outputs: list[int]
    path: str

    @property
    def name(self) -> str:
        """The operation's name without its overload, such as `view` or `linear`."""
        return self.op if isinstance(self.op, str) else self.op.overloadpacket.__name__


@dataclass(frozen=True)
class Ref:
    """A tensor among a node's arguments."""

    value: int


@dataclass
class Entry:
    """A call of a module, with nodes `start` to `stop`.

    Attributes:
        arguments: the tensors among its own arguments, by position or keyword.
        results: the tensors in its result.
    """

    path: str
    arguments: dict[int | str, int]
    start: int
    stop: int = 0
    results: list[int] = field(default_factory=list)


@dataclass
class PythonCall:
    """A call of a torch function in the model's own code. Arguments have `Ref`s in place of tensors."""

    name: str
    path: str
    site: Site | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Site:
    """Position of a call in the model's source code.

    `span` is (first line, last line, first column, last column) of `code`.
    """

    code: CodeType
    span: tuple[int | None, int | None, int | None, int | None]


class Unfollowable(Exception):
    """Raised if a division of tensors cannot be propagated. The text names the operation, `path` the module."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.path = path
