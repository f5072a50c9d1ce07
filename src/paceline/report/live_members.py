"""Members of a followed run: which ranks take part and which are lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Literal

from paceline.run.record.run import Run

State = Literal["starts", "in", "back", "lost", "out", "left"]
STATES: dict[State, str] = {
    "starts": "starts",
    "in": "takes part",
    "back": "lost, and started again",
    "lost": "lost, and waited for",
    "out": "lost, and left out",
    "left": "left, as somebody asked",
}
MOST_RANKS = 4096  # that are followed


@dataclass
class Member:
    """A rank: its host, its state since a Unix time, and whether it is slow."""

    host: str
    state: State = "starts"
    since: float = 0.0
    slow: bool = False


class Members:
    """Ranks of a run by number, as its events tell of them.

    Attributes:
        generation: of the ranks' membership: how often they have met anew.
    """

    def __init__(self, run: Run) -> None:
        self.generation = 0
        self.ranks: dict[int, Member] = {}
        self.planned(run)

    def planned(self, run: Run) -> None:
        """Have the ranks that the plan names, each on its host."""
        ranks = min(run.plan.ranks, MOST_RANKS)
        cluster = run.cluster
        each = cluster.ranks_per_host(run.plan.ranks) if cluster.devices else []
        hosts = chain.from_iterable(repeat(host.name, here) for host, here in zip(cluster.hosts, each, strict=False))
        names = dict(zip(range(ranks), hosts, strict=False))
        self.ranks = {rank: self.ranks.get(rank) or Member(names.get(rank, "")) for rank in range(ranks)}

    def told(self, event: dict[str, Any]) -> None:
        """Take in an event."""
        at = float(event["time"])
        if event["event"] in ("lost", "host_lost", "joins"):
            self.generation = min(max(self.generation, int(event.get("generation", 0))), 2**53)
        match event["event"]:
            case "launch" | "restart":
                self.generation = 0
                self._set([rank for rank, member in self.ranks.items() if member.state != "left"], "starts", at)
            case "start" | "resume":
                self._set([rank for rank, member in self.ranks.items() if member.state == "starts"], "in", at)
            case "lost":
                self._set([event["rank"]], "back" if event["again"] else "out", at)
            case "host_lost":
                self._set(event["ranks"], "lost" if event["again"] else "out", at)
            case "host_back":
                self._set(event["ranks"], "back", at)
            case "healed":
                self._set([event["rank"]], "in", at)
            case "scaled":
                self._set(event["ranks"], "left" if event["by"] < 0 else "back", at)
            case "slow_rank" | "slow_rank_over" if (member := self.ranks.get(event["rank"])) is not None:
                member.slow = event["event"] == "slow_rank"

    def take_part(self, rank: int) -> bool:
        """True of a rank that takes part, or of which nothing is told."""
        return rank not in self.ranks or self.ranks[rank].state == "in"

    def stepped(self, rank: int, at: float) -> None:
        """Take in that a rank made a step: it takes part, whatever was told before."""
        member = self.ranks.get(rank)
        if member is None:
            if rank < MOST_RANKS:
                self.ranks[rank] = Member("", "in", at)
        elif member.state != "in" and at > member.since:
            member.state, member.since = "in", at

    def _set(self, ranks: Iterable[int], state: State, at: float) -> None:
        for rank in ranks:
            if (member := self.ranks.get(rank)) is not None:
                member.state, member.since = state, at
