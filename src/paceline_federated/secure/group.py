"""The server's side of one group of clients in a secure round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import SecureSumError
from paceline_federated.secure.masks import Numbers
from paceline_federated.secure.messages import Announcement, PublicKeys, Terms, Unmasking
from paceline_federated.secure.server import SecureSum

Plain = dict[str, Any]


class Group:
    """Clients that are summed together.

    Args:
        terms: of their sum.
        keys: public keys of all of them, by number.
        phase_s: seconds for each answer.
        now: seconds on the clock of `advance`.

    Attributes:
        total: the sum; None until it is known, or where there is none.
        problem: reason why there is no sum.
        lost: clients that did not answer in time.
    """

    def __init__(self, terms: Terms, keys: Mapping[int, Announcement], phase_s: float, now: float) -> None:
        self.terms, self.members = terms, set(keys)
        self.total: Numbers | None = None
        self.problem: str | None = None
        self.lost: set[int] = set()
        self._phase_s, self._until = phase_s, now + phase_s
        self._sum = SecureSum(terms)
        for number, each in keys.items():
            self._sum.take_keys(number, each)
        self._keys = self._sum.close_keys()
        self._shares: dict[int, dict[int, bytes]] = {}

    @property
    def ended(self) -> bool:
        """True once there is a sum, or a reason for none."""
        return self.total is not None or self.problem is not None

    @property
    def survivors(self) -> set[int]:
        """Clients that are in the sum."""
        return self._sum.survivors

    def work(self, number: int) -> Plain | None:
        """The next answer that is awaited from a client; None where there is none."""
        if self.ended or number in self._sum.answered() or number not in self._sum.expected():
            return None
        match self._sum.phase:
            case "shares":
                keys = {peer: list(each) for peer, each in self._keys.items()}
                terms = self.terms
                about = {"name": terms.name, "threshold": terms.threshold, "numbers": terms.numbers, "most": terms.most}
                return {"do": "shares", "terms": about, "keys": keys}
            case "vectors":
                return {"do": "vector", "shares": self._shares[number]}
            case "unmasking":
                return {"do": "unmasking", "survivors": sorted(self.survivors)}
        return None

    def take(self, number: int, kind: str, content: Any) -> None:
        """A client's answer.

        Raises:
            SecureSumError: it is late, twice, or not what was asked for.
        """
        match kind:
            case "shares":
                self._sum.take_shares(number, _bytes_by_number(content))
            case "vector":
                self._sum.take_vector(number, _numbers(content))
            case "unmasking":
                if not (isinstance(content, list) and len(content) == 2):
                    raise SecureSumError(f"client {number} gave up what are no shares")
                self._sum.take_unmasking(number, Unmasking(*map(_bytes_by_number, content)))
            case _:
                raise SecureSumError(f"client {number} sent {kind!r}, which no round asks for")

    def leave(self, number: int) -> None:
        """Wait for a client no more, which said that it cannot answer."""
        self.lost.add(number)

    def advance(self, now: float) -> None:
        """Go on to the next phase if all have answered, or the time is over."""
        while not self.ended:
            awaited = self._sum.expected() - self._sum.answered() - self.lost
            if awaited and now < self._until:
                return
            self.lost |= awaited
            try:
                self._close()
            except SecureSumError as error:
                self.problem = str(error)
            self._until = now + self._phase_s

    def _close(self) -> None:
        match self._sum.phase:
            case "shares":
                self._shares = self._sum.close_shares()
            case "vectors":
                self._sum.close_vectors()
            case "unmasking":
                self.total = self._sum.close_unmasking()


def public_keys(content: Any) -> Announcement:
    """The keys that a client has sent.

    Raises:
        SecureSumError: these are none.
    """
    if isinstance(content, list) and len(content) == 3 and all(isinstance(key, bytes) for key in content):
        return Announcement(PublicKeys(*content[:2]), content[2])
    raise SecureSumError("a client sent what are no keys")


def as_tensor(numbers: Numbers) -> Tensor:
    """Numbers of a sum as they travel."""
    return torch.from_numpy(numbers.view("int32"))


def _numbers(content: Any) -> Numbers:
    if not (isinstance(content, Tensor) and content.dtype == torch.int32 and content.dim() == 1):
        raise SecureSumError("a client sent what is no vector of a secure sum")
    return content.numpy().view("uint32")


def _bytes_by_number(content: Any) -> dict[int, bytes]:
    if isinstance(content, dict) and all(isinstance(k, int) and isinstance(v, bytes) for k, v in content.items()):
        return content
    raise SecureSumError("a client sent what are no shares")
