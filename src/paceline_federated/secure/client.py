"""One client's end of a secure sum (Bonawitz et al., 2017, arXiv:1611.04482), without sockets.

Its calls come in this order, each with what the server has passed on: `keys`, `shares`, `masked`, `unmask`. The server
follows the protocol and wants to know: it learns the sum alone, unless a threshold of clients conspires with it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paceline.errors import SecureSumError
from paceline_federated.secure.masks import KEY_BYTES, KeyPair, Numbers, add_mask, agreed_key, neighbours
from paceline_federated.secure.messages import NEIGHBOURS, Announcement, PublicKeys, Terms, Unmasking
from paceline_federated.secure.shares import SHARE_BYTES, divided


class SecureClient:
    """The secrets of one client in one round. It is made anew for every round.

    Args:
        number: of this client among those of the round, from 1 on.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._terms, self._name = Terms("", 0, 0, 0), b""
        self._for_shares, self._for_masks = KeyPair.make(), KeyPair.make()
        self._public = PublicKeys(self._for_shares.public, self._for_masks.public)
        self._own_mask = secrets.token_bytes(KEY_BYTES)
        self._peers: dict[int, PublicKeys] = {}
        self._ciphers: dict[int, AESGCM] = {}
        self._held: dict[int, tuple[bytes, bytes]] = {}  # shares of own mask and of mask key, by whose they are
        self._done: list[str] = []

    def keys(self) -> Announcement:
        """The public keys of this client, and a digest of its own mask's key."""
        self._now("keys", after="")
        return Announcement(self._public, own_mask_digest(self._own_mask))

    def shares(self, terms: Terms, keys: Mapping[int, PublicKeys]) -> dict[int, bytes]:
        """Shares of this client's secrets, each encrypted for the client that is to hold it.

        Args:
            terms: of the sum, as the server has told all of its clients.
            keys: of all clients that take part, this one included.

        Raises:
            SecureSumError: so few would not hide this client, or a key is missing, changed or there twice.
        """
        self._now("shares", after="keys")
        terms.must_protect(len(keys))
        self._terms, self._name = terms, terms.name.encode()
        if keys.get(self.number) != self._public:
            raise SecureSumError("the server has passed on other keys than this client's own; nothing more was sent")
        public = [key for each in keys.values() for key in (each.shares, each.masks)]
        if len(set(public)) != len(public):
            raise SecureSumError("two of the round's clients have the same key; nothing more was sent")
        holders = sorted(keys)
        of_own_mask = divided(self._own_mask, holders, self._terms.threshold)
        of_mask_key = divided(self._for_masks.private, holders, self._terms.threshold)
        self._peers = {number: each for number, each in keys.items() if number != self.number}
        for number, each in self._peers.items():
            self._ciphers[number] = AESGCM(agreed_key(self._for_shares, each.shares, "shares", self._name))
        self._held[self.number] = of_own_mask[self.number], of_mask_key[self.number]
        return {
            number: cipher.encrypt(
                _nonce(self.number), of_own_mask[number] + of_mask_key[number], self._between(self.number, number)
            )
            for number, cipher in self._ciphers.items()
        }

    def masked(self, shares: Mapping[int, bytes], vector: Numbers) -> Numbers:
        """The vector under this client's masks; it looks random to anybody else.

        Args:
            shares: encrypted for this client, by whose they are. Who sent none takes no part any more.
            vector: of `FixedPoint.encode`; the result is written over it.

        Raises:
            SecureSumError: too few are left, or a share is not for this client, this round or from whom it is said.
        """
        self._now("masked", after="shares")
        if len(vector) != self._terms.numbers:
            raise SecureSumError(f"{len(vector):,} numbers for a secure sum of {self._terms.numbers:,}")
        if unknown := shares.keys() - self._peers.keys():
            raise SecureSumError(f"shares of client {min(unknown)}, who sent no keys")
        if len(shares) + 1 < self._terms.threshold:
            raise SecureSumError(f"{len(shares) + 1} clients sent shares; the sum needs {self._terms.threshold}")
        for number, encrypted in shares.items():
            self._held[number] = self._opened(number, encrypted)
        masking = self._neighbours() & shares.keys()
        if 2 * len(masking) < min(len(self._peers), NEIGHBOURS):
            raise SecureSumError(f"only {len(masking)} of this client's neighbours are left to mask its vector")
        add_mask(vector, self._own_mask)
        for number in masking:
            key = agreed_key(self._for_masks, self._peers[number].masks, "mask", self._name)
            add_mask(vector, key, 1 if self.number < number else -1)
        return vector

    def unmask(self, survivors: Collection[int]) -> Unmasking:
        """Shares by which the server can take masks off the survivors' sum alone.

        Raises:
            SecureSumError: so few survivors would not hide this client, or it is none of them.
        """
        self._now("unmask", after="masked")
        kept = set(survivors)
        if self.number not in kept or not kept <= self._held.keys():
            raise SecureSumError("the server names survivors that are none of this round; nothing was given up")
        if len(kept) < self._terms.threshold:
            raise SecureSumError(f"{len(kept)} clients are left; the sum needs {self._terms.threshold}")
        of_own_masks = {number: self._held[number][0] for number in kept}
        of_mask_keys = {number: held[1] for number, held in self._held.items() if number not in kept}
        return Unmasking(of_own_masks, of_mask_keys)

    def _neighbours(self) -> set[int]:
        keys = {number: each.masks for number, each in self._peers.items()} | {self.number: self._public.masks}
        return neighbours(self.number, keys, self._name, NEIGHBOURS)

    def _now(self, what: str, after: str) -> None:
        """Have everything happen once and in order.

        A second answer could tell what the first one hides.
        """
        before = self._done[-1] if self._done else ""
        if before != after:
            raise SecureSumError(f"{what} after {before or 'nothing'} in round {self._terms.name}")
        self._done.append(what)

    def _opened(self, number: int, encrypted: bytes) -> tuple[bytes, bytes]:
        try:
            plain = self._ciphers[number].decrypt(_nonce(number), encrypted, self._between(number, self.number))
        except InvalidTag:
            plain = b""
        if len(plain) != 2 * SHARE_BYTES:
            raise SecureSumError(f"the share of client {number} does not open; nothing more was sent")
        return plain[:SHARE_BYTES], plain[SHARE_BYTES:]

    def _between(self, sender: int, receiver: int) -> bytes:
        return b"%b|%d|%d" % (self._name, sender, receiver)


def own_mask_digest(key: bytes) -> bytes:
    """The digest by which the server sees that it got this key back."""
    return hashlib.sha256(b"paceline own mask|" + key).digest()


def _nonce(sender: int) -> bytes:
    # a key is of two clients in one round, and each encrypts once with it
    return sender.to_bytes(12, "big")
