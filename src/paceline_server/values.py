"""Values in remote calls: numbers, text, containers, tensors and registered classes.

`pack` converts a value to msgpack types and a list of attached memory, which has the bytes of large tensors without a
copy. `unpack` is strict: it refuses data that `pack` cannot produce, and only uses classes that this process has
registered.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from paceline.errors import RemoteError

T = TypeVar("T")
INLINE_BYTES = 2**14  # maximum size of an inline tensor or bytes value; larger values are attached to the message
_MOST_INLINE = 2**20  # maximum size of all inline values together
_ALIGNMENT = 64  # alignment of an attached tensor, in bytes
TUPLE, OBJECT, TENSOR, LARGE_TENSOR, LARGE_BYTES = range(1, 6)  # extension types of msgpack
_PADDING = memoryview(bytes(_ALIGNMENT))
_LENGTH = struct.Struct("<Q")
_HEADER_BYTES = 8  # bytes of a tensor's header, and of each dimension in the header
_MOST_DEPTH = 100
# Peers depend on this order: append only, with a new VERSION.
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_OF_NUMPY = {torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64, torch.bool}
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}


class _Kind(NamedTuple):
    """Dataclass that may be sent, with its name in messages."""

    name: str
    kind: type
    fields: list[str]


_kinds: dict[type, _Kind] = {}
_kinds_by_name: dict[str, _Kind] = {}


def sendable(kind: type[T]) -> type[T]:
    """Register a dataclass, so that this process can send and receive its instances.

    Both ends must register the class.
    """
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__qualname__} is not a dataclass")
    name = f"{kind.__module__}:{kind.__qualname__}"
    fields = [field.name for field in dataclasses.fields(kind) if field.init]
    _kinds[kind] = _kinds_by_name[name] = _Kind(name, kind, fields)
    return kind


class Packed(NamedTuple):
    """Value in the form in which it is sent.

    Attributes:
        tree: the value in msgpack types.
        parts: attached memory, with `nbytes` bytes in total.
    """

    tree: Any
    parts: list[memoryview]
    nbytes: int


def pack(value: Any) -> Packed:
    """Convert a value for sending. Large tensors must not change before the value is sent.

    Raises:
        RemoteError: the value contains a type that cannot be sent. The message lists the allowed types.
    """
    packer = _Packer()
    tree = packer.pack(value, 0)
    return Packed(tree, packer.parts, packer.nbytes)


def unpack(tree: Any, block: memoryview | None) -> Any:
    """Convert received data to a value. Tensors share the block's memory and keep it alive.

    Raises:
        RemoteError: `pack` cannot produce this data, or the data contains a class that is not registered.
    """
    unpacker = _Unpacker(block)
    value = unpacker.unpack(tree, 0)
    if block is not None and unpacker.used < len(block):
        raise RemoteError(
            "remote.bytes_of_no_tensor",
            "{bytes:,} bytes are attached to a message, but do not belong to any of its tensors",
            bytes=len(block) - unpacker.used,
        )
    return value


class _Packer:
    def __init__(self) -> None:
        self.parts: list[memoryview] = []
        self.nbytes = self._inline = 0

    def pack(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is float or kind is bool or kind is str:
            return value
        if kind is int:
            if not -(2**63) <= value < 2**64:
                raise RemoteError(
                    "remote.int_too_large",
                    "an int of {bits} bits cannot be sent; send at most 64 bits, or a str",
                    bits=value.bit_length(),
                )
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if depth > _MOST_DEPTH:
            raise RemoteError(
                "remote.too_deep", "a value nested more than {limit} deep cannot be sent", limit=_MOST_DEPTH
            )
        if kind is list:
            return [self.pack(item, depth + 1) for item in value]
        if kind is tuple:
            return [_MARK_TUPLE, *(self.pack(item, depth + 1) for item in value)]
        if kind is dict:
            return dict(self._items(value, depth))
        if kind is bytes:
            return self._bytes(value)
        return self._object(value, depth)

    def _items(self, value: dict[Any, Any], depth: int) -> Iterator[tuple[str | int, Any]]:
        for key, item in value.items():
            if type(key) is not str and not (type(key) is int and -(2**63) <= key < 2**64):
                raise RemoteError(
                    "remote.dict_key",
                    "a dict with the key {key!r:.80} cannot be sent; keys must be str, or int of at most 64 bits",
                    key=key,
                )
            yield key, self.pack(item, depth + 1)

    def _object(self, value: Any, depth: int) -> Any:
        kind = _kinds.get(type(value))
        if kind is None:
            hint = "`.item()` makes a number of it" if hasattr(value, "item") else "`sendable` lets dataclasses be sent"
            raise RemoteError(
                "remote.value_unsupported",
                "a value of type {module}.{class_name} cannot be sent; tensors, numbers, str, bytes, None, list, "
                "tuple and dict can ({hint})",
                module=type(value).__module__,
                class_name=type(value).__qualname__,
                hint=hint,
            )
        fields = [getattr(value, field) for field in kind.fields]
        return [msgspec.msgpack.Ext(OBJECT, kind.name.encode()), self.pack(fields, depth + 1)]

    def _bytes(self, value: bytes) -> Any:
        if self._fits_inline(len(value)):
            return value
        self._attach(memoryview(value))
        return msgspec.msgpack.Ext(LARGE_BYTES, _LENGTH.pack(len(value)))

    def _tensor(self, tensor: Tensor) -> Any:
        data = _bytes_of(tensor)
        header = header_of(tensor.dtype, tensor.shape)
        if self._fits_inline(len(data)):
            return msgspec.msgpack.Ext(TENSOR, header + data)
        self._attach(data)
        return msgspec.msgpack.Ext(LARGE_TENSOR, header)

    def _fits_inline(self, nbytes: int) -> bool:
        fits = nbytes <= INLINE_BYTES and self._inline + nbytes <= _MOST_INLINE
        self._inline += nbytes if fits else 0
        return fits

    def _attach(self, data: memoryview) -> None:
        self.parts.append(data)
        if padding := -len(data) % _ALIGNMENT:
            self.parts.append(_PADDING[:padding])
        self.nbytes += len(data) + padding


_MARK_TUPLE = msgspec.msgpack.Ext(TUPLE, b"")


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, copied if it is not contiguous."""
    if type(tensor) is not Tensor and type(tensor) not in (torch.nn.Parameter, torch.nn.Buffer):
        raise RemoteError(
            "remote.tensor_class",
            "a {class_name} cannot be sent; send a plain tensor with its values",
            class_name=type(tensor).__qualname__,
        )
    if tensor.dtype in _OF_NUMPY and tensor.is_cpu and not tensor.requires_grad:
        try:
            array = tensor.numpy()
        except (RuntimeError, TypeError):  # the tensor is not dense, or is a conjugated view
            return _bytes_of_any(tensor)
        return (array if array.flags.c_contiguous else array.copy("C")).reshape(-1).view(np.uint8).data
    return _bytes_of_any(tensor)


def _bytes_of_any(tensor: Tensor) -> memoryview:
    known = tensor.dtype in _DTYPE_NUMBERS
    if not known or tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise RemoteError(
            "remote.tensor_unsupported",
            "a tensor of dtype {dtype} and layout {layout} on {type} cannot be sent; only dense tensors with "
            "values can be sent",
            dtype=tensor.dtype,
            layout=tensor.layout,
            type=tensor.device.type,
        )
    values = tensor.detach()
    if values.is_conj() or values.is_neg():
        values = values.resolve_conj().resolve_neg()
    data: memoryview = values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return data


@functools.lru_cache(maxsize=4096)
def header_of(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Encode dtype and shape of a tensor in a multiple of 8 bytes."""
    return struct.pack(f"<BB6x{len(shape)}Q", len(shape), _DTYPE_NUMBERS[dtype], *shape)


@functools.lru_cache(maxsize=4096)
def _read_header(header: bytes) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Decode the dtype, shape and number of values."""
    dimensions, number = header[:2]
    shape = struct.unpack_from(f"<{dimensions}Q", header, _HEADER_BYTES)
    count = math.prod(shape)
    strides = math.prod(max(size, 1) for size in shape)  # the sizes of an empty tensor must also fit into 64 bits
    if number >= len(_DTYPES) or any(header[2:_HEADER_BYTES]) or max(strides, *shape, 0) >= 2**48:
        raise RemoteError("remote.tensor_impossible", "the peer sent a tensor with an invalid dtype or shape")
    return _DTYPES[number], shape, count


class _Unpacker:
    def __init__(self, block: memoryview | None) -> None:
        self._block = block
        self._nbytes = 0 if block is None else len(block)
        self.used = 0

    def unpack(self, tree: Any, depth: int) -> Any:
        kind = type(tree)
        if tree is None or kind is float or kind is bool or kind is str or kind is int or kind is bytes:
            return tree
        if depth > 2 * _MOST_DEPTH:
            raise RemoteError(
                "remote.received_too_deep", "the peer sent a value nested more than {limit} deep", limit=_MOST_DEPTH
            )
        if kind is msgspec.msgpack.Ext:
            return self._extension(tree.code, bytes(tree.data))
        if kind is list:
            if tree and type(tree[0]) is msgspec.msgpack.Ext:
                if tree[0].code == TUPLE:
                    return tuple([self.unpack(item, depth + 1) for item in tree[1:]])
                if tree[0].code == OBJECT:
                    return self._object(tree, depth)
            return [self.unpack(item, depth + 1) for item in tree]
        if kind is dict:
            return {_key(key): self.unpack(item, depth + 1) for key, item in tree.items()}
        raise RemoteError(
            "remote.class_unexpected", "the peer sent a {class_name}, which is not allowed", class_name=kind.__name__
        )

    def _object(self, tree: list[Any], depth: int) -> Any:
        name = bytes(tree[0].data).decode("utf-8", "backslashreplace")
        if name not in _kinds_by_name or len(tree) != 2:
            raise RemoteError(
                "remote.class_unregistered",
                "the peer sent a {name!r}, which this process has not registered (`sendable`)",
                name=name[:200],
            )
        _, kind, fields = _kinds_by_name[name]
        plain = self.unpack(tree[1], depth + 1)
        if not isinstance(plain, list) or len(plain) != len(fields):
            raise RemoteError(
                "remote.fields_differ",
                "{class_name} has the fields {fields} in this process, but different fields on the peer",
                class_name=kind.__qualname__,
                fields=list(fields),
            )
        return kind(**dict(zip(fields, plain, strict=True)))

    def _extension(self, code: int, data: bytes) -> Any:
        if code == LARGE_BYTES and len(data) == _LENGTH.size:
            begin, end = self._part(_LENGTH.unpack(data)[0])
            assert self._block is not None
            return bytes(self._block[begin:end])
        if code not in (TENSOR, LARGE_TENSOR):
            raise RemoteError(
                "remote.extension_unexpected", "the peer sent an extension {code}, which is not allowed", code=code
            )
        begin = _HEADER_BYTES * (1 + data[0]) if data else _HEADER_BYTES
        if len(data) < begin:
            raise RemoteError("remote.header_missing", "the peer sent a tensor without a header")
        dtype, shape, count = _read_header(data[:begin])
        nbytes = count * dtype.itemsize
        if code == TENSOR:
            if len(data) - begin != nbytes:
                raise RemoteError(
                    "remote.tensor_bytes",
                    "the peer sent {bytes:,} bytes for a tensor of {expected:,}",
                    bytes=len(data) - begin,
                    expected=nbytes,
                )
            return _tensor_of(bytearray(data), dtype, shape, count, begin)
        if len(data) != begin:
            raise RemoteError("remote.header_too_long", "the peer sent extra bytes after the header of a tensor")
        return _tensor_of(self._block, dtype, shape, count, self._part(nbytes)[0])

    def _part(self, nbytes: int) -> tuple[int, int]:
        """Return the next bytes of the block, whose parts follow the order of the values."""
        begin = self.used
        if not 0 < nbytes <= self._nbytes - begin:
            raise RemoteError(
                "remote.bytes_announced",
                "the peer attached {there:,} bytes to its message, but announced {used:,}",
                used=nbytes,
                there=self._nbytes - begin,
            )
        self.used = begin + nbytes + -nbytes % _ALIGNMENT
        return begin, begin + nbytes


def _tensor_of(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], count: int, offset: int) -> Tensor:
    if not count:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    return tensor if len(shape) == 1 else tensor.view(shape)


def _key(key: Any) -> str | int:
    if type(key) is not str and type(key) is not int:
        raise RemoteError(
            "remote.key_unexpected",
            "the peer sent a dict with a key of type {class_name}",
            class_name=type(key).__name__,
        )
    return key


@sendable
@dataclass(frozen=True)
class Held:
    """Stand-in for an object in the serving process."""

    number: str


def tensors_of(value: Any) -> list[Tensor]:
    """List all tensors in lists, tuples, dicts and data classes."""
    found: list[Tensor] = []

    def keep(tensor: Any) -> Any:
        if isinstance(tensor, Tensor):
            found.append(tensor)
        return tensor

    mapped(keep, value)
    return found


def with_tensors(value: Any, tensors: list[Any]) -> Any:
    """Copy a nested value, and replace its tensors in order."""
    remaining = iter(tensors)
    return mapped(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Copy a nested value with `function` applied to its leaves.

    Lists, tuples, dicts and data classes are not leaves.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(mapped(function, entry) for entry in value)
    if isinstance(value, dict):
        return {key: mapped(function, entry) for key, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type | Held):
        changes = {each.name: mapped(function, getattr(value, each.name)) for each in fields(value) if each.init}
        return replace(value, **changes)
    return function(value)
