"""What unauthenticated peers say in tests: handshakes as of a run, with random changes."""

from __future__ import annotations

import random
import ssl
from contextlib import suppress
from functools import cache

from paceline.wire.key import RunKey


def mutated_hello(seed: int) -> bytes:
    """The beginning of a handshake with some bytes changed, left out, or put in."""
    chance, hello = random.Random(seed), _hello()
    at = chance.randrange(len(hello))
    return hello[:at] + chance.randbytes(chance.randrange(20)) + hello[at + chance.randrange(20) :]


@cache
def _hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        RunKey.make().client_context().wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()
