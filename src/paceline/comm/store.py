"""The channel's rendezvous store as one of `torch.distributed`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.errors import ChannelError, DeadlineError
from paceline.generation import generation_is_over, generations_are_watched
from paceline.wire.store import StoreClient

_LOOK_S = 0.05  # between two looks at whether the generation is over


class ChannelStore(Store):
    """A store whose server only processes of the run reach.

    torch's own objects hold the C++ part of it alone: whoever makes it keeps it for as long as they live. Its errors
    are those of torch's `TCPStore`: DistStoreError after a deadline, DistNetworkError where the server is lost.
    """

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self._client = client
        self.set_timeout(timedelta(seconds=client.deadline_s))

    def close(self) -> None:
        """Close the connections to the server."""
        self._client.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        with _as_torch_tells():
            self._client.set(key, _bytes(value), self._deadline_s)

    def get(self, key: str) -> bytes:
        """A value, waited for until it is there."""
        if generations_are_watched():
            self.wait([key])
        with _as_torch_tells():
            return self._client.get(key, self._deadline_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        deadline_s = self._deadline_s if timeout is None else timeout.total_seconds()
        with _as_torch_tells():
            if not generations_are_watched():
                self._client.wait(keys, deadline_s)
                return
            until = time.monotonic() + deadline_s
            while not self._came(keys, until - time.monotonic()):
                if generation_is_over():
                    raise DeadlineError(f"{', '.join(keys[:3])} is waited for no more: the generation is over")

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are there."""
        with _as_torch_tells():
            return self._client.check(keys, self._deadline_s)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 where there is none; returns the sum."""
        with _as_torch_tells():
            return self._client.add(key, amount, self._deadline_s)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value, empty where there is none."""
        with _as_torch_tells():
            self._client.append(key, _bytes(value), self._deadline_s)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if it is the expected one; returns the value then."""
        with _as_torch_tells():
            return self._client.compare_set(key, _bytes(expected), _bytes(desired), self._deadline_s)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several values, waited for until all are there."""
        with _as_torch_tells():
            return self._client.get_all(keys, self._deadline_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        with _as_torch_tells():
            self._client.set_all(dict(zip(keys, map(_bytes, values), strict=True)), self._deadline_s)

    def delete_key(self, key: str) -> bool:
        """Delete a key; True if it was there."""
        with _as_torch_tells():
            return self._client.delete(key, self._deadline_s)

    def num_keys(self) -> int:
        """The number of keys."""
        with _as_torch_tells():
            return self._client.num_keys(self._deadline_s)

    def has_extended_api(self) -> bool:
        """True: `append`, `multi_get` and `multi_set` are there."""
        return True

    # by these names torch's C++ calls them
    deleteKey, getNumKeys = delete_key, num_keys

    def _came(self, keys: Sequence[str], left_s: float) -> bool:
        """True once all keys are there; False after a short wait."""
        try:
            self._client.wait(keys, max(0.0, min(left_s, _LOOK_S)))
        except DeadlineError:
            if left_s <= _LOOK_S:
                raise
            return False
        return True

    @property
    def _deadline_s(self) -> float:
        return float(self.timeout.total_seconds())  # type: ignore[attr-defined]


@contextmanager
def _as_torch_tells() -> Iterator[None]:
    try:
        yield
    except DeadlineError as error:
        raise dist.DistStoreError(str(error)) from error
    except ChannelError as error:
        raise dist.DistNetworkError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
