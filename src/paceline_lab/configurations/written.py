"""The text of a configuration that was written from a plan."""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import PlanError


class Written(NamedTuple):
    """A written configuration: its text, and the usual ending of its file's name.

    Attributes:
        launch: the command's options that the file has no place for; "" if there are none.
    """

    text: str
    suffix: str
    launch: str = ""


def ranks_per_host(ranks: int, per_host: int) -> int:
    """Ranks of each host where all hosts have as many, at most `per_host`."""
    return max(each for each in range(1, min(ranks, per_host) + 1) if ranks % each == 0)


def refuse(system: str, plan: str, reasons: list[str]) -> None:
    """Raise the reasons why a system cannot do what a plan has.

    Raises:
        PlanError: there is any.
    """
    if reasons:
        raise PlanError(f"{system} cannot do what {plan} has: {'; '.join(reasons)}")
