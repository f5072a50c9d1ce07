"""Plain data that a client and the server tell each other in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import SecureSumError

NEIGHBOURS = 32  # with which a client masks its vector
FEWEST = 3  # clients in a sum: of two, each knows the other's update by its own


class PublicKeys(NamedTuple):
    """Public keys of a client: one to encrypt shares for it, one for its masks."""

    shares: bytes
    masks: bytes


class Announcement(NamedTuple):
    """A client's first message: its public keys, and a digest for the server alone."""

    keys: PublicKeys
    own_mask_digest: bytes


class Unmasking(NamedTuple):
    """Shares that a client gives up, by the client whose secret they are of.

    Of one that is in the sum it is a share of its own mask, of one that is lost, of its mask key: never of both.
    """

    of_own_masks: Mapping[int, bytes]
    of_mask_keys: Mapping[int, bytes]


@dataclass(frozen=True)
class Terms:
    """The terms of a secure sum, which every client checks before it sends anything.

    Args:
        name: of the round, in no other sum before.
        threshold: clients that must stay until the end, and that would have to conspire with the server.
        numbers: length of a vector.
        most: clients at most.
    """

    name: str
    threshold: int
    numbers: int
    most: int

    def must_protect(self, clients: int) -> None:
        """Raise SecureSumError where a sum over so many clients would not hide one of them."""
        if clients < FEWEST or clients > self.most:
            raise SecureSumError(
                f"a secure sum of {clients} clients: there are at least {FEWEST} and at most {self.most} in this one"
            )
        if not clients < 2 * self.threshold <= 2 * clients:
            raise SecureSumError(
                f"a secure sum of {clients} clients with a threshold of {self.threshold}: it is more than half of them "
                "and at most all, or the server could ask two halves for different secrets"
            )


def default_threshold(clients: int) -> int:
    """Two thirds of the clients, rounded up, and more than half of few."""
    return max(-(-2 * clients // 3), clients // 2 + 1)
