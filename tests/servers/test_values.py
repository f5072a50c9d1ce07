"""Values that are sent: the same at the other end, and strictly read."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import RemoteError
from paceline_server.values import (
    INLINE_BYTES,
    LARGE_BYTES,
    LARGE_TENSOR,
    OBJECT,
    TENSOR,
    Packed,
    header_of,
    pack,
    sendable,
    unpack,
)
from refusals import raises
from remote_services import Point

KEYS = st.one_of(st.text(max_size=5), st.integers(-(2**63), 2**64 - 1))
SHAPES = st.lists(st.integers(0, 4), max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=10),
    st.binary(max_size=10),
    st.builds(lambda shape, dtype: torch.randn(shape).to(dtype), SHAPES, DTYPES),
    st.builds(lambda count: torch.arange(count).flip(0), st.integers(INLINE_BYTES // 8, INLINE_BYTES)),
    st.builds(lambda count: bytes(count), st.integers(INLINE_BYTES, 2 * INLINE_BYTES)),
    st.builds(Point, st.floats(allow_nan=False), st.builds(torch.zeros, SHAPES)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def there(packed: Packed) -> tuple[Any, memoryview | None]:
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(packed.tree))
    block = bytearray(b"".join(packed.parts))
    assert len(block) == packed.nbytes
    return tree, memoryview(block) if block else None


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, Point):
        assert_same([one.x, one.at], [other.x, other.at])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    else:
        assert one == other


@given(VALUES)
def test_a_value_is_the_same_at_the_other_end(value: Any) -> None:
    assert_same(unpack(*there(pack(value))), value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(300, 200).t(),
        torch.rand(8, 8)[::2, 1::3],
        torch.rand(5, dtype=torch.complex64).conj(),
        torch.tensor(3.0).expand(4, 5),
        torch.nn.Parameter(torch.rand(3)),
        torch.rand(4).to(torch.float8_e5m2),
        torch.rand(100_000).half(),
    ],
    ids=["transposed", "strided", "conjugated", "expanded", "parameter", "8 bits", "16 bits"],
)
def test_a_tensor_in_any_form_arrives_dense_with_its_values(tensor: Tensor) -> None:
    found = unpack(*there(pack(tensor)))
    assert found.dtype == tensor.dtype
    assert torch.equal(found.to(torch.complex128), tensor.detach().to(torch.complex128))
    assert not found.requires_grad


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@dataclasses.dataclass
class Unknown:
    number: int


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ({1, 2}, "remote.value_unsupported"),
        (Unknown(1), "remote.value_unsupported"),
        (torch.rand(2).numpy()[0], "remote.value_unsupported"),
        (2**64, "remote.int_too_large"),
        ({1.5: 2}, "remote.dict_key"),
        ({True: 2}, "remote.dict_key"),
        (nested(500), "remote.too_deep"),
        (torch.eye(2).to_sparse(), "remote.tensor_unsupported"),
        (torch.empty(2, device="meta"), "remote.tensor_unsupported"),
        (lambda: 1, "remote.value_unsupported"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_what_can(value: Any, code: str) -> None:
    with raises(RemoteError, code):
        pack([value])


def extension(code: int, data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, data)


HEADER = header_of(torch.float32, (4,))


@pytest.mark.parametrize(
    ("tree", "block"),
    [
        (extension(TENSOR, b""), b""),
        (extension(TENSOR, HEADER), b""),
        (extension(TENSOR, HEADER + bytes(17)), b""),
        (extension(TENSOR, HEADER[:9]), b""),
        (extension(TENSOR, b"\0\xff" + bytes(10)), b""),
        (extension(LARGE_TENSOR, HEADER), b""),
        (extension(LARGE_TENSOR, HEADER), bytes(15)),
        (extension(LARGE_TENSOR, HEADER + b"more"), bytes(64)),
        (extension(LARGE_TENSOR, header_of(torch.float32, (2**40, 2**40))), bytes(64)),
        (extension(LARGE_TENSOR, header_of(torch.float32, (0,))), bytes(64)),
        (extension(TENSOR, header_of(torch.float32, (0, 0, 2**24, 2**40))), b""),
        (extension(LARGE_BYTES, (2**63).to_bytes(8, "little")), bytes(64)),
        (extension(LARGE_BYTES, b"short"), bytes(64)),
        (extension(99, b""), b""),
        (extension(-1, bytes(4)), b""),
        ([extension(OBJECT, b"os:system"), ["ls"]], b""),
        ([extension(OBJECT, b"remote_services:Point")], b""),
        ([extension(OBJECT, b"remote_services:Point"), [1]], b""),
        ({1.5: 2}, b""),
        (nested(500), b""),
        (1, bytes(64)),
    ],
)
def test_what_no_peer_sends_is_refused(tree: Any, block: bytes) -> None:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(tree))
    with pytest.raises(RemoteError):
        unpack(decoded, memoryview(bytearray(block)) if block else None)


@given(VALUES, st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_changed_value_is_a_value_or_refused_and_nothing_else(value: Any, edits: list[tuple[int, int]]) -> None:
    packed = pack(value)
    data = bytearray(msgspec.msgpack.encode(packed.tree))
    for place, byte in edits:
        data[place % len(data)] = byte
    block = bytearray(b"".join(packed.parts))
    try:
        unpack(msgspec.msgpack.decode(bytes(data)), memoryview(block) if block else None)
    except (RemoteError, msgspec.MsgspecError, ValueError, RecursionError):
        return


def test_only_dataclasses_are_sendable_by_their_fields() -> None:
    with pytest.raises(TypeError, match="not a dataclass"):
        sendable(dict)
