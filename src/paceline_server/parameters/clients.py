"""Clients of a server: members, counts, and the answer to each one's last operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from paceline.errors import ServerRefused
from paceline_server.parameters.operations import Reply

_MOST_KEPT = 2**14  # records of clients that have left


@dataclass
class Client:
    """Record of one client.

    Attributes:
        pushes: that were applied, or are in a sum that will be.
        late: whose ticket had been dealt to another client.
        bounded: that were scaled down to the norm bound.
        read: version that its last push was computed with.
        staleness: how often a push was so many steps late.
        clock: pushes, counted from the slowest member's when it joined.
        replaced: another client has joined under its name.
    """

    name: str
    sequence: int = 0
    reply: Reply | None = None
    pushes: int = 0
    late: int = 0
    bounded: int = 0
    bytes: int = 0
    read: int = -1
    clock: int = 0
    replaced: bool = False
    staleness: Counter[int] = field(default_factory=Counter)

    def note_push(self, read: int, behind: int) -> None:
        """Count a push."""
        self.pushes += 1
        self.clock += 1
        self.read = read
        self.staleness[behind] += 1


class Clients:
    """All clients by their identity, and the members among them by name."""

    def __init__(self, most_members: int) -> None:
        self._most = most_members
        self._all: dict[str, Client] = {}
        self._members: dict[str, str] = {}

    @property
    def members(self) -> Set[str]:
        """Names of the members."""
        return self._members.keys()

    def identities(self) -> Mapping[str, str]:
        """The members' identities by name."""
        return self._members

    def answered(self, identity: str, sequence: int) -> Reply | None:
        """The answer to an operation that was applied; None if it is new. Raises ServerRefused where it is older."""
        client = self._all.get(identity)
        if client is None or sequence > client.sequence:
            return None
        if sequence < client.sequence:
            raise ServerRefused(
                f"{client.name} repeated operation {sequence} after {client.sequence}: it was applied, or given up"
            )
        return client.reply

    def know(self, name: str, identity: str) -> None:
        """Have a record of a client, member or not."""
        self._all.setdefault(identity, Client(name))

    def answer(self, identity: str, sequence: int, reply: Reply) -> None:
        """Keep the answer to a client's last operation, for when it is asked again."""
        client = self._all[identity]
        client.sequence, client.reply = sequence, reply

    def must_be_free(self, name: str, identity: str) -> None:
        """Refuse one more member than allowed, and one whose place another has taken. Raises ServerRefused."""
        if identity in self._all and self._all[identity].replaced:
            raise ServerRefused(f"another process has joined as {name} since, and has taken this one's place")
        if len(self._members) >= self._most and name not in self._members:
            raise ServerRefused(f"{name} joins as one too many: {self._most:,} members are allowed (most_members)")

    def must_be_member(self, name: str, identity: str) -> None:
        """Refuse a client that is none. Raises ServerRefused."""
        if self._members.get(name) != identity:
            gone = "was lost to the others, or has left" if identity in self._all else "has not joined"
            raise ServerRefused(f"{name} is no member of this server: it {gone}. Call join first")

    def member(self, name: str) -> Client:
        """The record of a member."""
        return self._all[self._members[name]]

    def replace(self, name: str, identity: str) -> bool:
        """True if another member has the name, and is to leave. None that has had it may come again."""
        for other, client in self._all.items():
            client.replaced |= client.name == name and other != identity
        return self._members.get(name, identity) != identity

    def join(self, name: str, identity: str) -> None:
        """Add a member, whose clock begins at the slowest one's."""
        clocks = [self._all[member].clock for member in self._members.values()]
        client = self._all[identity]
        client.name, client.clock = name, min(clocks, default=client.clock)
        self._members[name] = identity

    def leave(self, name: str, identity: str | None) -> bool:
        """Remove a member, this identity or any; returns whether it was one. Its record stays a while."""
        if name not in self._members or identity not in (None, self._members[name]):
            return False
        left = self._members.pop(name)
        self._all[left] = self._all.pop(left)  # the newest of those that have left
        gone = [identity for identity in self._all if identity not in self._members.values()] if self._full() else []
        for oldest in gone[: len(self._all) - len(self._members) - _MOST_KEPT]:
            del self._all[oldest]
        return True

    def ahead(self, name: str) -> tuple[int, str]:
        """Pushes by which a member is ahead of the slowest, and who that is. (0 for one that is no member.)"""
        if name not in self._members:
            return 0, name
        slowest = min(self._members, key=lambda member: self.member(member).clock)
        return self.member(name).clock - self.member(slowest).clock, slowest

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Counts of each client by name; those of clients of one name are added."""
        counts: dict[str, dict[str, Any]] = {}
        for client in self._all.values():
            of = counts.setdefault(
                client.name, dict.fromkeys(("pushes", "late", "bounded", "bytes"), 0) | {"staleness": {}}
            )
            for key in ("pushes", "late", "bounded", "bytes"):
                of[key] += getattr(client, key)
            for behind, count in client.staleness.items():
                of["staleness"][behind] = of["staleness"].get(behind, 0) + count
            of["read"], of["member"] = client.read, client.name in self._members
        return counts

    def state(self) -> dict[str, Any]:
        """Everything here, as plain values."""
        return {
            "all": {
                identity: {
                    **asdict(client),
                    "reply": client.reply and msgspec.to_builtins(client.reply),
                    "staleness": dict(client.staleness),
                }
                for identity, client in self._all.items()
            },
            "members": dict(self._members),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._members = dict(state["members"])
        self._all = {
            identity: Client(
                **{
                    **values,
                    "reply": values["reply"] and msgspec.convert(values["reply"], Reply),
                    "staleness": Counter(values["staleness"]),
                }
            )
            for identity, values in state["all"].items()
        }

    def _full(self) -> bool:
        return len(self._all) - len(self._members) > _MOST_KEPT
