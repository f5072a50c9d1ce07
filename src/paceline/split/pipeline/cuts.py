"""Modules at which a pipeline's stages begin: named by the plan, or every possible one."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import PlanError
from paceline.split.pipeline.forward_trace import Cut, ForwardTrace


def named_cuts(trace: ForwardTrace, names: Sequence[str]) -> tuple[list[Cut], list[str]]:
    """Cuts before the named modules, and reasons why others need torch.export.

    Raises:
        PlanError: a module is no place to cut at all, or the names are not in the order of the calls.
    """
    cuts = [trace.cut(name) for name in names]
    good = [cut for cut in cuts if isinstance(cut, Cut)]
    reasons = [cut for cut in cuts if isinstance(cut, str)]
    places = [trace.enters(name) for name in names]
    problems = [reason for reason, place in zip(cuts, places, strict=True) if isinstance(reason, str) and not place]
    in_order = [name for _, name in sorted(zip(places, names, strict=True))]
    if not problems and in_order != list(names):
        problems.append(f"the modules are called in the order {','.join(in_order)}; name them so")
    if problems:
        raise PlanError("\n".join(f"cut={','.join(names)}: {problem}" for problem in problems))
    return good, reasons


def possible_cuts(trace: ForwardTrace, blocks: Sequence[str]) -> tuple[list[Cut], list[str]]:
    """Possible cuts in order, and reasons why the model cannot be cut before other blocks.

    A model can be cut before blocks, and where one tensor crosses between outermost modules.
    """
    cuts: dict[int, Cut] = {}
    reasons = []
    inside = tuple(f"{name}." for name in blocks)
    seen: set[str] = set()
    for module_call in trace.module_calls:
        if not module_call.name or module_call.name in seen or module_call.name.startswith(inside):
            continue
        seen.add(module_call.name)
        cut = trace.cut(module_call.name)
        if isinstance(cut, str):
            reasons += [cut] if module_call.name in blocks[1:] else []
        elif module_call.name in blocks or len(cut.values) == 1:
            cuts[cut.time] = cut
    found: list[Cut] = []
    for cut in (cuts[time] for time in sorted(cuts)):
        # Two cuts with no computation between them are one; the outer module's name is kept.
        if trace.used(found[-1].time if found else -1, cut.time):
            found.append(cut)
    if found and not trace.used(found[-1].time, ForwardTrace.END):
        found.pop()
    return found, reasons
