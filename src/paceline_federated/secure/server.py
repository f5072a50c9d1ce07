"""The server's end of a secure sum, without sockets; it keeps no client's vector.

Phases follow each other as `close_…` is called, when all have answered or the deadline has passed: keys, shares,
vectors, unmasking. Clients may be lost in each, as long as a threshold stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import numpy as np

from paceline.errors import SecureSumError
from paceline_federated.secure.client import own_mask_digest
from paceline_federated.secure.masks import KEY_BYTES, KeyPair, Numbers, add_mask, agreed_key, neighbours
from paceline_federated.secure.messages import FEWEST, NEIGHBOURS, Announcement, PublicKeys, Terms, Unmasking
from paceline_federated.secure.shares import SHARE_BYTES, Recovery

Phase = Literal["keys", "shares", "vectors", "unmasking", "ended"]
_SEALED_BYTES = 2 * SHARE_BYTES + 16  # of two shares for one holder, encrypted


class SecureSum:
    """The sum of one round over clients that are known by their numbers.

    Attributes:
        phase: what is awaited from clients now.
        survivors: numbers of the clients that are in the sum; known from the end of the vectors on.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.phase: Phase = "keys"
        self._keys: dict[int, PublicKeys] = {}
        self._digests: dict[int, bytes] = {}
        self._shares: dict[int, dict[int, bytes]] = {}  # by holder, then by whose they are
        self._sharers: set[int] = set()
        self.survivors: set[int] = set()
        self._unmasking: dict[int, Unmasking] = {}
        self._total: Numbers = np.zeros(terms.numbers, dtype=np.uint32)

    def answered(self) -> set[int]:
        """The clients that have answered in this phase."""
        answers: dict[Phase, Collection[int]] = {
            "keys": self._keys,
            "shares": self._sharers,
            "vectors": self.survivors,
            "unmasking": self._unmasking,
        }
        return set(answers.get(self.phase, ()))

    def expected(self) -> set[int]:
        """The clients that may answer in this phase; for keys, those that have answered."""
        after: dict[Phase, Collection[int]] = {
            "shares": self._keys,
            "vectors": self._sharers,
            "unmasking": self.survivors,
        }
        return set(after.get(self.phase, self._keys))

    def take_keys(self, number: int, announced: Announcement) -> None:
        """A client's public keys. Raises SecureSumError where they come late, twice, or are none."""
        self._must_be_new("keys", number, self._keys)
        sizes = {len(key) for key in (*announced.keys, announced.own_mask_digest)}
        if sizes != {KEY_BYTES} or len(self._keys) >= self.terms.most:
            raise SecureSumError(f"client {number} sent keys that are none, or one client too many takes part")
        self._keys[number], self._digests[number] = announced

    def close_keys(self) -> dict[int, PublicKeys]:
        """All public keys, for every client that sent some."""
        self._close("keys", "shares", len(self._keys))
        self.terms.must_protect(len(self._keys))
        return dict(self._keys)

    def take_shares(self, number: int, shares: Mapping[int, bytes]) -> None:
        """A client's encrypted shares, by who is to hold them."""
        self._must_be_new("shares", number, self._sharers, self._keys)
        if shares.keys() != self._keys.keys() - {number} or any(len(s) != _SEALED_BYTES for s in shares.values()):
            raise SecureSumError(f"client {number} sent shares that are not one for each other client")
        self._sharers.add(number)
        for holder, encrypted in shares.items():
            self._shares.setdefault(holder, {})[number] = encrypted

    def close_shares(self) -> dict[int, dict[int, bytes]]:
        """Encrypted shares for each client that sent its own, by whose they are."""
        self._close("shares", "vectors", len(self._sharers))
        return {number: self._shares.get(number, {}) for number in self._sharers}

    def take_vector(self, number: int, vector: Numbers) -> None:
        """Add a client's masked vector."""
        self._must_be_new("vectors", number, self.survivors, self._sharers)
        if vector.shape != self._total.shape or vector.dtype != np.uint32:
            raise SecureSumError(f"client {number} sent {vector.size:,} numbers instead of {len(self._total):,}")
        np.add(self._total, vector, out=self._total)
        self.survivors.add(number)

    def close_vectors(self) -> set[int]:
        """The clients that are in the sum, for each of them."""
        self._close("vectors", "unmasking", len(self.survivors))
        self._shares.clear()
        return set(self.survivors)

    def take_unmasking(self, number: int, unmasking: Unmasking) -> None:
        """A survivor's shares of the others' secrets."""
        self._must_be_new("unmasking", number, self._unmasking, self.survivors)
        whole = (
            unmasking.of_own_masks.keys() == self.survivors
            and unmasking.of_mask_keys.keys() == self._sharers - self.survivors
        )
        if not whole:
            raise SecureSumError(f"client {number} gave up other shares than were asked for")
        self._unmasking[number] = unmasking

    def close_unmasking(self) -> Numbers:
        """The sum over the survivors modulo 2^32.

        Raises:
            SecureSumError: too few have answered, or their shares do not give the secrets back.
        """
        self._close("unmasking", "ended", len(self._unmasking))
        for recovery in self._recoveries():
            if (found := self._secrets(recovery)) is not None:
                return self._without_masks(*found)
        raise SecureSumError(
            f"the shares of round {self.terms.name} do not give its masks back: several of its clients sent wrong ones"
        )

    def _recoveries(self) -> Iterator[Recovery]:
        """Choices of shares: the first ones, then without one client each, which may lie."""
        answered = sorted(self._unmasking)
        yield Recovery(answered[: self.terms.threshold])
        if len(answered) > self.terms.threshold:
            for liar in answered[: self.terms.threshold]:
                yield Recovery([number for number in answered if number != liar][: self.terms.threshold])

    def _secrets(self, recovery: Recovery) -> tuple[dict[int, bytes], dict[int, KeyPair]] | None:
        """Own masks of survivors and mask keys of the lost; None if one is wrong."""
        chosen = {holder: self._unmasking[holder] for holder in recovery.holders}
        own_masks, lost = {}, {}
        for number in self.survivors:
            secret = recovery.secret({holder: each.of_own_masks[number] for holder, each in chosen.items()})
            if secret is None or own_mask_digest(secret) != self._digests[number]:
                return None
            own_masks[number] = secret
        for number in self._sharers - self.survivors:
            secret = recovery.secret({holder: each.of_mask_keys[number] for holder, each in chosen.items()})
            if secret is None or (pair := KeyPair.of(secret)).public != self._keys[number].masks:
                return None
            lost[number] = pair
        return own_masks, lost

    def _without_masks(self, own_masks: Mapping[int, bytes], lost: Mapping[int, KeyPair]) -> Numbers:
        for key in own_masks.values():
            add_mask(self._total, key, -1)
        keys = {number: each.masks for number, each in self._keys.items()}
        for gone, pair in lost.items():
            around = neighbours(gone, keys, self.terms.name.encode(), NEIGHBOURS)
            for number in self.survivors & around:
                key = agreed_key(pair, self._keys[number].masks, "mask", self.terms.name.encode())
                add_mask(self._total, key, -1 if number < gone else 1)
        return self._total

    def _must_be_new(
        self, phase: Phase, number: int, given: Collection[int], allowed: Collection[int] | None = None
    ) -> None:
        if self.phase != phase:
            raise SecureSumError(f"client {number} sent {phase} when the round was at {self.phase}: too late")
        if number in given:
            raise SecureSumError(f"client {number} sent {phase} twice")
        if allowed is not None and number not in allowed:
            raise SecureSumError(f"client {number} is no longer in the round")

    def _close(self, phase: Phase, following: Phase, stayed: int) -> None:
        assert self.phase == phase, f"{phase} closed in {self.phase}"
        self.phase = following
        needed = max(self.terms.threshold, FEWEST)
        if stayed < needed:
            self.phase = "ended"
            raise SecureSumError(
                f"round {self.terms.name}: {stayed} clients stayed until the end of its {phase}, and {needed} are "
                "needed"
            )
