"""Finds clients that poison secure sums, from which sums were refused.

A sum that no clients within the clipping bound can make has a poisoner in it. Groups are drawn anew in every round, so
a client whose group was refused is cleared by the next one that was not; who alone in a refused group was never
cleared is the poisoner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class Suspects:
    """Clients by what is known of the sums that they were in."""

    def __init__(self) -> None:
        self._refused: list[set[str]] = []
        self._cleared: set[str] = set()
        self.found: set[str] = set()

    def accepted(self, clients: Collection[str]) -> set[str]:
        """Note a sum that is within its bounds. Returns who is found out by that."""
        self._cleared |= set(clients)
        return self._conclude()

    def refused(self, clients: Collection[str]) -> set[str]:
        """Note a sum that is beyond its bounds. Returns who is found out by that."""
        self._refused.append(set(clients))
        return self._conclude()

    @property
    def searching(self) -> bool:
        """True while a refused sum is not explained."""
        return bool(self._refused)

    def state(self) -> dict[str, list[str] | list[list[str]]]:
        """Everything as plain values."""
        return {
            "refused": [sorted(group) for group in self._refused],
            "cleared": sorted(self._cleared),
            "found": sorted(self.found),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take a state back."""
        self._refused = [set(group) for group in state["refused"]]
        self._cleared, self.found = set(state["cleared"]), set(state["found"])

    def _conclude(self) -> set[str]:
        new: set[str] = set()
        for group in list(self._refused):
            culprits = group - self._cleared
            if group & self.found or not culprits:
                # explained; or somebody poisons now and then, so that being cleared once proves nothing
                self._refused.remove(group)
                if not culprits:
                    self._cleared -= group
            elif len(culprits) == 1:
                new |= culprits
                self.found |= culprits
                self._refused.remove(group)
        return new
