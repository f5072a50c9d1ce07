"""Secrets in shares, of which a threshold gives the secret back and fewer tell nothing (Shamir, 1979).

Each limb of a secret is the constant term of a random polynomial over the integers modulo 2^31 - 1; holder h has its
value at h.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paceline.errors import SecureSumError

Limbs = npt.NDArray[np.int64]

PRIME = 2**31 - 1
SECRET_BYTES = 32
_LIMB_BITS = 30
LIMBS = -(-SECRET_BYTES * 8 // _LIMB_BITS)
SHARE_BYTES = 4 * LIMBS


def divided(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Shares of a secret of 32 bytes, one for each holder.

    Args:
        holders: numbers from 1 to 2^31 - 2, each once.
        threshold: shares that give the secret back; one less tells nothing.
    """
    if len(secret) != SECRET_BYTES:
        raise SecureSumError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    _must_be_holders(holders)
    if not 1 <= threshold <= len(holders):
        raise SecureSumError(f"{len(holders)} holders cannot need {threshold} shares of a secret")
    coefficients = _random_limbs(threshold)
    coefficients[0] = _limbs(secret)
    points = np.array(holders, dtype=np.int64)[:, None]
    values = np.zeros((len(holders), LIMBS), dtype=np.int64)
    for row in coefficients[::-1]:  # Horner: the highest power first
        values = (values * points + row) % PRIME
    rows = values.astype("<u4")
    return {holder: rows[at].tobytes() for at, holder in enumerate(holders)}


class Recovery:
    """Gives back secrets whose shares are held by the same holders.

    Args:
        holders: those whose shares are used, as many as the threshold.
    """

    def __init__(self, holders: Sequence[int]) -> None:
        _must_be_holders(holders)
        self.holders = list(holders)
        self._weights = np.array([_weight_at_zero(holder, holders) for holder in holders], dtype=np.int64)

    def secret(self, shares: Mapping[int, bytes]) -> bytes | None:
        """The secret of these shares; None where they are no shares of one.

        Any other secret may come out where some shares are wrong: compare what comes with what is known of it.
        """
        if any(len(shares.get(holder, b"")) != SHARE_BYTES for holder in self.holders):
            return None
        rows = np.stack([np.frombuffer(shares[holder], dtype="<u4") for holder in self.holders]).astype(np.int64)
        if (rows >= PRIME).any():
            return None
        # each product is below 2^62 and is reduced before it is summed
        limbs = (rows * self._weights[:, None] % PRIME).sum(axis=0) % PRIME
        number = 0
        for limb in limbs[::-1]:
            number = number << _LIMB_BITS | int(limb)
        if (limbs >> _LIMB_BITS).any() or number >> (8 * SECRET_BYTES):
            return None
        return number.to_bytes(SECRET_BYTES, "little")


def _limbs(secret: bytes) -> Limbs:
    number = int.from_bytes(secret, "little")
    mask = (1 << _LIMB_BITS) - 1
    return np.array([number >> (_LIMB_BITS * at) & mask for at in range(LIMBS)], dtype=np.int64)


def _random_limbs(rows: int) -> Limbs:
    """Numbers below the prime, all equally likely, from the system's source."""
    needed = rows * LIMBS
    found = np.zeros(0, dtype=np.int64)
    while len(found) < needed:
        drawn = np.frombuffer(secrets.token_bytes(4 * (needed - len(found))), dtype="<u4").astype(np.int64) & PRIME
        found = np.concatenate([found, drawn[drawn != PRIME]])
    return found.reshape(rows, LIMBS)


def _weight_at_zero(holder: int, holders: Sequence[int]) -> int:
    """Lagrange's coefficient of one holder, at 0."""
    above, below = 1, 1
    for other in holders:
        if other != holder:
            above = above * other % PRIME
            below = below * (other - holder) % PRIME
    return above * pow(below, -1, PRIME) % PRIME


def _must_be_holders(holders: Sequence[int]) -> None:
    if len(set(holders)) != len(holders) or any(not 0 < holder < PRIME for holder in holders):
        raise SecureSumError("holders of shares are different numbers, from 1 on")
