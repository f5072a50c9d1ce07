"""TLS 1.3 handshake with the run's key, on a socket that does not block.

Both ends prove the key, then each sends one message inside TLS. After that the socket is theirs: exactly the records of
TLS are read from it and no byte more, so what follows on it may be something else.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct

_HEADER = struct.Struct(">BHH")  # type, version, length
_FIRST, _VERSION = 22, 3  # a handshake; the major version, as every TLS writes it
_LONGEST = 2**14 + 256  # a record of TLS
_MOST_BYTES = 2**15  # of a whole handshake; ours takes 3,000


class TlsHandshake:
    """One end of the handshake.

    Args:
        context: of the run's key.
        accepts: True at the end that was connected to.
        opening: what to say, inside TLS, once the handshake is done.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, accepts: bool, opening: bytes = b""
    ) -> None:
        self.connection = connection
        self._context, self._accepts, self._opening = context, accepts, opening
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None  # an unauthenticated peer who says something else costs none
        self._shaken = False
        self._record = bytearray()
        self._read_bytes = 0
        self._message = b""

    def message(self, length: int) -> bytes | None:
        """Continue as far as possible; returns the other's message once it is whole.

        Raises:
            OSError: the other does not hold the key, speaks no TLS 1.3, or has gone.
        """
        if self._accepts and self._tls is None and not self._feed():
            return None
        while not self._advance(length):
            if not self._feed():
                return None
        return self._message

    def send(self, message: bytes) -> None:
        """Say something inside TLS, after the handshake."""
        assert self._tls is not None
        self._tls.write(message)
        self._flush()

    def _advance(self, length: int) -> bool:
        """Let TLS work on what has come; True when the message is whole."""
        if self._tls is None:
            self._tls = self._context.wrap_bio(self._in, self._out, server_side=self._accepts)
        try:
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
                if self._opening:
                    self._tls.write(self._opening)
            while len(self._message) < length:
                found = self._tls.read(length - len(self._message))
                if not found:
                    raise _closed()
                self._message += found
        except ssl.SSLWantReadError:
            return False
        finally:
            self._flush()  # also the alert that says why it failed
        return True

    def _flush(self) -> None:
        if data := self._out.read():
            try:
                sent = self.connection.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):  # all of it fits any buffer
                raise ConnectionError("the other side takes nothing")

    def _feed(self) -> bool:
        """Give TLS the next record, if all of it has come."""
        length = 0
        if len(self._record) < _HEADER.size:
            self._receive(_HEADER.size)
        if len(self._record) >= _HEADER.size:
            kind, version, length = _HEADER.unpack_from(self._record)
            if version >> 8 != _VERSION or length > _LONGEST or (self._tls is None and kind != _FIRST):
                raise ConnectionError("the other side does not speak TLS")
            self._receive(_HEADER.size + length)
        if len(self._record) < _HEADER.size + length:
            return False
        self._in.write(self._record)
        self._record.clear()
        return True

    def _receive(self, size: int) -> None:
        try:
            found = self.connection.recv(size - len(self._record))
        except BlockingIOError:
            return
        if not found:
            raise _closed()
        self._record += found
        self._read_bytes += len(found)
        if self._read_bytes > _MOST_BYTES:
            raise ConnectionError("the other side's handshake has no end")


def _closed() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "the connection was closed before it was made")
