"""Shape rewriter, which changes full sizes in code to sizes on one rank.

Only a copy of the method on this module is rewritten, never the source file. Worked example, with tp=2, hidden size 64
and 8 heads of 8:

    def forward(self, x):                      # x (n, t, 64)
        q = self.query(x)                      # (n, t, 64); column-parallel, so (n, t, 32) on a rank
        q = q.view(n, t, self.heads, 8)        # fails on a rank: 4 heads are left, self.heads is 8

1. The trace of the whole model labels the result of this `view`: it is divided along dimension 2 (`rules`).
2. A second trace gives `query` the weight (32, 64) of a rank. Before each Python call it asks `ShapeRewriter`, which
   sees the full size 8 in dimension 2 of a result with that label. It passes on 4 instead, and notes the rewrite (site
   of the call, "sizes", 2).
3. `install` parses the source of `forward`, finds the call that ends at that line and column, and compiles a copy of
   the method with `q.view(n, t, self.heads // 2, 8)`, which it sets on this one module.
4. A third trace runs the rewritten model without help, and `degrees.compare` requires the same operations on exactly
   the shapes of a rank's part. A wrong rewrite therefore leaves the region replicated; it never changes results.

There are other kinds of rewrites. `x.split(self.width)` becomes `x.split(_paceline_part(self.width, 2, None))`,
`x[..., : self.width]` becomes `x[..., : self.width // 2]`. Starred sizes, `x.view(*sizes, 8)`, become
`x.view(_paceline_part((*sizes, 8), 2, 2))`. If several ranks share a head of keys and values (`shared_heads`), fewer
query heads on a rank share it: this number is changed in a call of the module's own code, or in the module's attribute
that a function reads.
"""

from __future__ import annotations

import ast
import copy
import linecache
from collections.abc import Callable
from functools import cache
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.planning.model.recorder import Graph, PythonCall, Site, Unfollowable
from paceline.planning.model.tensor.regions import Repeat, counts_of, repeats_of
from paceline.planning.model.tensor.rules import Label


class Rewrite(NamedTuple):
    """Size in a module's code that is divided by `by` on a rank.

    Attributes:
        site: position of the call in the code; None for an attribute of the module.
        kind: `sizes`, `split`, `slice` or `repeats`, or the attribute's name.
        which: index of the size among the sizes of the call.
    """

    site: Site | None
    kind: str
    which: int
    by: int


# maps module paths to rewrites
Rewrites = dict[str, set[Rewrite]]
# for a call: its rewrites' (kind, which, by)
_Changes = list[tuple[str, int, int]]
_PART = "_paceline_part"
_OF_TENSOR = {"view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "new_full"}
_NEW = {"zeros", "ones", "empty", "full"}


class ShapeRewriter:
    """Recorder of the sizes that must change on a rank, used during a second trace.

    In this trace, parameters have the shapes of one rank. An instance is passed as the argument `rewrite` of
    `record_graph`. The attribute `rewrites` contains the result.
    """

    def __init__(self, graph: Graph, labels: dict[int, Label], ranks: int, model: nn.Module) -> None:
        self.graph = graph
        self.labels = labels
        self.ranks = ranks
        self.model = model
        self.rewrites: Rewrites = {}
        # by the results with repeated heads
        self.repeated: dict[int, Repeat] = {}
        self.merged: dict[int, Repeat] = {}
        for repeat in repeats_of(graph, labels, ranks):
            if repeat.repeated is None or repeat.merged is None:
                self._note_attributes(repeat)
            else:
                self.repeated[repeat.repeated] = self.merged[repeat.merged] = repeat

    def __call__(
        self, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if number >= len(self.graph.calls) or self.graph.calls[number].name != name:
            raise Unfollowable(f"the divided model runs different code from the undivided model at {name}")
        full = self.graph.calls[number]
        repeat = next((self.repeated[v] for v in full.results if v in self.repeated), None)
        if repeat is not None:
            args, kwargs = self._repeats(full, args, kwargs, repeat)
        label = next((self.labels[v] for v in full.results if v in self.labels), None)
        if label is None:
            return args, kwargs
        if name in _OF_TENSOR or name in _NEW:
            return self._sizes(full, args, label, first=int(name in _OF_TENSOR)), kwargs
        if name in {"split", "split_with_sizes"}:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            if dim % len(self._shape(full)) == label.dim:
                return self._split(full, args, label), kwargs
        if name == "__getitem__":
            return self._slice(full, args, label), kwargs
        return args, kwargs

    def _shape(self, full: PythonCall) -> tuple[int, ...]:
        return self.graph.values[full.results[0]].shape

    def _note(self, full: PythonCall, kind: str, which: int, by: int) -> None:
        if full.site is None:
            raise Unfollowable(f"{full.name} in {full.path} needs other sizes, but its source code was not found")
        self.rewrites.setdefault(full.path, set()).add(Rewrite(full.site, kind, which, by))

    def _note_attributes(self, repeat: Repeat) -> bool:
        """Note that a module's attributes with the repeat count of heads must be divided.

        Returns False if the module has no such attributes.
        """
        names = counts_of(self.model.get_submodule(repeat.path), repeat.times)
        if names:
            self.rewrites.setdefault(repeat.path, set()).update(Rewrite(None, name, 0, repeat.by) for name in names)
        return bool(names)

    def _elsewhere(self, full: PythonCall, repeat: Repeat) -> bool:
        """True if code outside of the module repeats heads, using a module's attribute."""
        if full.site is None or _is_own(self.model.get_submodule(full.path), full.site.code):
            return False
        return self._note_attributes(repeat)

    def _repeats(
        self, full: PythonCall, args: tuple[Any, ...], kwargs: dict[str, Any], repeat: Repeat
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Change a call to repeat each head once per query head on a rank."""
        own = repeat.times // repeat.by
        if full.name == "repeat_interleave":
            if not self._elsewhere(full, repeat):
                self._note(full, "repeats", 0, repeat.by)
            if "repeats" in kwargs:
                return args, kwargs | {"repeats": own}
            return (args[0], own, *args[2:]), kwargs
        if full.name != "expand":
            return args, kwargs
        sequence = not isinstance(args[1], int)
        sizes = list(args[1] if sequence else args[1:])
        if sizes[repeat.dim] != repeat.times:
            return args, kwargs
        if not self._elsewhere(full, repeat):
            self._note(full, "sizes", repeat.dim, repeat.by)
        sizes[repeat.dim] = own
        return ((args[0], tuple(sizes)) if sequence else (args[0], *sizes)), kwargs

    def _sizes(self, full: PythonCall, args: tuple[Any, ...], label: Label, first: int) -> tuple[Any, ...]:
        whole, rest = self._shape(full)[label.dim], args[first:]
        sequence = bool(rest) and not isinstance(rest[0], int)
        if not rest or (sequence and not isinstance(rest[0], (tuple, list))):
            # view(dtype), or sizes given by keyword: the comparison of shapes shows whether that is correct
            return args
        sizes = list(rest[0] if sequence else rest)
        parts, by = label.parts(self.ranks), label.parts(self.ranks)
        repeat = next((self.merged[v] for v in full.results if v in self.merged), None)
        elsewhere = repeat is not None and self._elsewhere(full, repeat)
        # a rank's heads, each repeated as often as in the whole model
        if repeat is not None and sizes[label.dim] == whole * repeat.by // parts:
            whole, by = sizes[label.dim], repeat.by
        if sizes[label.dim] != whole:
            return args
        if not elsewhere:
            self._note(full, "sizes", label.dim, by)
        sizes[label.dim] = whole // by
        return (*args[:first], tuple(sizes), *rest[1:]) if sequence else (*args[:first], *sizes)

    def _split(self, full: PythonCall, args: tuple[Any, ...], label: Label) -> tuple[Any, ...]:
        if args[1] != full.args[1]:
            return args
        parts = label.parts(self.ranks)
        self._note(full, "split", 0, parts)
        return (args[0], part(args[1], parts), *args[2:])

    def _slice(self, full: PythonCall, args: tuple[Any, ...], label: Label) -> tuple[Any, ...]:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        before = full.args[1] if isinstance(full.args[1], tuple) else (full.args[1],)
        if any(isinstance(x, Tensor) or x is None for x in index):
            return args
        dims = args[0].dim()
        at = next((i for i, x in enumerate(index) if x is Ellipsis), len(index))
        for i, x in enumerate(index):
            dim = i if i < at else dims - len(index) + i
            moved = sum(isinstance(y, int) for j, y in enumerate(index) if j < i)
            if (
                isinstance(x, slice)
                and dim - moved == label.dim
                and x == before[i]
                and (x.start, x.stop) != (None, None)
            ):
                parts = label.parts(self.ranks)
                self._note(full, "slice", i, parts)
                cut = slice(*(None if b is None else b // parts for b in (x.start, x.stop)))
                return (args[0], (*index[:i], cut, *index[i + 1 :]))
        return args


def part(sizes: Any, ranks: int, which: int | None = None) -> Any:
    """Return the sizes on one rank, given the full sizes.

    An integer is divided. Of a list, all sizes are divided, or only size number `which`.
    """
    if isinstance(sizes, int):
        return sizes // ranks
    if which is None:
        return [size // ranks for size in sizes]
    return torch.Size(size // ranks if i == which % len(sizes) and size != -1 else size for i, size in enumerate(sizes))


def install(model: nn.Module, rewrites: Rewrites) -> Callable[[], None]:
    """Install the rewritten methods and attributes, and return a function that removes them.

    Raises:
        Unfollowable: a size to rewrite is in code that is not a method of the module, or whose source is not available.
    """
    installed: list[tuple[nn.Module, str]] = []
    attributes: list[tuple[nn.Module, str, int]] = []

    def remove() -> None:
        for module, name in installed:
            module.__dict__.pop(name, None)
        for module, name, before in attributes:
            module.__dict__[name] = before

    try:
        for path, changes in rewrites.items():
            module = model.get_submodule(path)
            for change in (change for change in changes if change.site is None):
                attributes.append((module, change.kind, module.__dict__[change.kind]))
                module.__dict__[change.kind] //= change.by
            for code in {change.site.code for change in changes if change.site is not None}:
                name, function = _method(module, code)
                ours = frozenset((c.site.span, *c[1:]) for c in changes if c.site is not None and c.site.code is code)
                module.__dict__[name] = MethodType(_changed(function, code, ours), module)
                installed.append((module, name))
    except Unfollowable:
        remove()
        raise
    return remove


def _is_own(module: nn.Module, code: CodeType) -> bool:
    found = (owner.__dict__.get(code.co_name) for owner in type(module).__mro__)
    return any(getattr(unwrap(function), "__code__", None) is code for function in found if function is not None)


def _method(module: nn.Module, code: CodeType) -> tuple[str, FunctionType]:
    for owner in type(module).__mro__:
        found = owner.__dict__.get(code.co_name)
        if isinstance(found, FunctionType) and found.__code__ is code and code.co_name not in module.__dict__:
            return code.co_name, found
        if isinstance(found, FunctionType) and getattr(unwrap(found), "__code__", None) is code:
            raise Unfollowable(f"{code.co_qualname} uses full sizes and has a decorator, so it cannot be rewritten")
    raise Unfollowable(f"{code.co_qualname} uses full sizes, but is not a plain method of {type(module).__name__}")


@cache
def _changed(function: FunctionType, code: CodeType, changes: frozenset[Any]) -> FunctionType:
    """Return a copy of a method with rewritten sizes.

    All modules of a class share the copy, so that a compiler compiles it only once.
    """
    tree = _definition(code)
    at: dict[tuple[int, int], _Changes] = {}
    for span, *one in sorted(changes):
        at.setdefault((span[1], span[3]), []).append((one[0], one[1], one[2]))
    change = _SizeTransformer(at)
    changed = change.visit(copy.deepcopy(tree))
    if change.open:
        raise Unfollowable(f"{code.co_qualname} uses full sizes outside of a plain call, so it cannot be rewritten")
    changed.decorator_list, changed.returns = [], None
    for argument in ast.walk(changed.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    changed.args.defaults = [ast.Constant(None) for _ in changed.args.defaults]  # the values follow below
    changed.args.kw_defaults = [ast.Constant(None) if d is not None else None for d in changed.args.kw_defaults]
    outer = [*code.co_freevars, _PART]
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(n) for n in outer], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    factory = ast.FunctionDef("make", arguments, [changed, ast.Return(ast.Name(changed.name, ast.Load()))], [])
    module = ast.fix_missing_locations(ast.Module([factory], []))
    names: dict[str, Any] = {}
    exec(compile(module, code.co_filename, "exec"), function.__globals__, names)
    made: FunctionType = names["make"](*(cell.cell_contents for cell in function.__closure__ or ()), part)
    made.__defaults__, made.__kwdefaults__, made.__qualname__ = (
        function.__defaults__,
        function.__kwdefaults__,
        function.__qualname__,
    )
    return made


def _definition(code: CodeType) -> ast.FunctionDef:
    tree = _parsed(code.co_filename)
    for node in ast.walk(tree):
        first = (
            min([node.lineno, *(d.lineno for d in node.decorator_list)]) if isinstance(node, ast.FunctionDef) else -1
        )
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name and first == code.co_firstlineno:
            return node
    raise Unfollowable(f"{code.co_qualname} uses full sizes, but its source code was not found")


@cache
def _parsed(file: str) -> ast.Module:
    lines = linecache.getlines(file)
    try:
        return ast.parse("".join(lines))
    except SyntaxError:
        raise Unfollowable(f"{file} has changed since it was imported") from None


class _SizeTransformer(ast.NodeTransformer):
    """AST transformer that rewrites sizes in calls and subscripts at given positions."""

    def __init__(self, at: dict[tuple[int, int], _Changes]) -> None:
        self.open = at

    def visit_Call(self, node: ast.Call) -> ast.AST:
        changes = self.open.pop((node.end_lineno or 0, node.end_col_offset or 0), [])
        self.generic_visit(node)
        for kind, which, by in changes:
            self._change(node, kind, which, by)
        return node

    def _change(self, node: ast.Call, kind: str, which: int, by: int) -> None:
        name = (
            node.func.attr
            if isinstance(node.func, ast.Attribute)
            else node.func.id
            if isinstance(node.func, ast.Name)
            else ""
        )
        of_torch = (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
        )
        start = 1 if of_torch and name not in _NEW else 0
        sizes = node.args[start:]
        if kind == "repeats":
            for keyword in node.keywords:
                keyword.value = self._divided(keyword.value, by) if keyword.arg == "repeats" else keyword.value
            if not any(keyword.arg == "repeats" for keyword in node.keywords):
                node.args[start] = self._divided(node.args[start], by)
        elif kind == "split":
            node.args[start] = self._part(node.args[start], by)
        elif (
            sizes
            and isinstance(sizes[0], (ast.Tuple, ast.List))
            and not any(isinstance(e, ast.Starred) for e in sizes[0].elts)
        ):
            sizes[0].elts[which] = self._divided(sizes[0].elts[which], by)
        elif len(sizes) > 1 and not any(isinstance(e, ast.Starred) for e in sizes) and name != "full":
            node.args[start + which] = self._divided(sizes[which], by)
        elif any(isinstance(e, ast.Starred) for e in sizes):
            node.args[start:] = [self._part(ast.Tuple(sizes, ast.Load()), by, which)]
        elif sizes:
            node.args[start] = self._part(sizes[0], by, which)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        changes = self.open.pop((node.end_lineno or 0, node.end_col_offset or 0), [])
        self.generic_visit(node)
        for _, which, by in changes:
            cut = node.slice.elts[which] if isinstance(node.slice, ast.Tuple) else node.slice
            if isinstance(cut, ast.Slice):
                cut.lower = cut.lower and self._divided(cut.lower, by)
                cut.upper = cut.upper and self._divided(cut.upper, by)
        return node

    def _divided(self, size: ast.expr, by: int) -> ast.expr:
        return ast.BinOp(size, ast.FloorDiv(), ast.Constant(by))

    def _part(self, sizes: ast.expr, by: int, which: int | None = None) -> ast.expr:
        return ast.Call(ast.Name(_PART, ast.Load()), [sizes, ast.Constant(by), ast.Constant(which)], [])
