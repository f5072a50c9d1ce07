"""Keys that two clients agree on through the server, and the masks from them.

A mask is the key stream of AES-256 in counter mode, read as numbers modulo 2^32. Every key makes one mask, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from paceline.errors import SecureSumError

Numbers = npt.NDArray[np.uint32]

KEY_BYTES = 32
_PART = 2**15  # numbers at a time: key stream and sum stay in a core's own cache
_BLOCK = 16
_ZEROS = bytes(4 * _PART)


class KeyPair:
    """An X25519 key of one client for one round.

    Args:
        key: the private key.
    """

    def __init__(self, key: X25519PrivateKey) -> None:
        self.key, self.public = key, key.public_key().public_bytes_raw()

    @classmethod
    def make(cls) -> KeyPair:
        """A new one."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def of(cls, private: bytes) -> KeyPair:
        """The pair of a private key's bytes."""
        return cls(X25519PrivateKey.from_private_bytes(private))

    @property
    def private(self) -> bytes:
        """The private key's bytes."""
        return self.key.private_bytes_raw()


def agreed_key(own: KeyPair, public: bytes, purpose: str, round_name: bytes) -> bytes:
    """The key of 32 bytes that both ends, and nobody else, derive from their pairs.

    Raises:
        SecureSumError: the other's public key is none.
    """
    try:
        shared = own.key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # of another length, or of low order
        raise SecureSumError(f"a client's public key is none: {error}") from None
    ends = b"".join(sorted((own.public, public)))
    about = purpose.encode() + b"|" + round_name + b"|" + ends
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=about).derive(shared)


def neighbours(number: int, keys: Mapping[int, bytes], round_name: bytes, most: int) -> set[int]:
    """Clients with which one masks its vector (Bell et al., 2020, arXiv:2012.05571); all, where there are few.

    Clients lie on a ring in an order that follows from the public keys of all, so nobody chooses it; neighbours are
    the nearest ones on both sides. The relation is mutual.

    Args:
        keys: public keys of the masks, by number.
        most: neighbours of each.
    """
    if len(keys) - 1 <= most:
        return keys.keys() - {number}
    drawn = hashlib.sha256(round_name + b"".join(keys[each] for each in sorted(keys))).digest()
    ring = sorted(keys, key=lambda each: hashlib.sha256(drawn + keys[each]).digest())
    place, reach = ring.index(number), max(1, most // 2)
    return {ring[(place + step) % len(ring)] for step in range(-reach, reach + 1) if step}


def add_mask(numbers: Numbers, key: bytes, sign: int = 1) -> None:
    """Add a key's mask to numbers modulo 2^32, in place, or subtract it."""
    stream = Cipher(AES256(key), CTR(bytes(_BLOCK))).encryptor()
    buffer = bytearray(4 * min(_PART, len(numbers)) + _BLOCK)
    for begin in range(0, len(numbers), _PART):
        part = numbers[begin : begin + _PART]
        stream.update_into(memoryview(_ZEROS)[: part.nbytes], buffer)
        mask = np.frombuffer(buffer, dtype="<u4", count=len(part))
        if sign > 0:
            np.add(part, mask, out=part)
        else:
            np.subtract(part, mask, out=part)
