"""The port of a run's rendezvous."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

from paceline.errors import LaunchError

ADDRESS = "127.0.0.1"


def listen(port: int | None, backlog: int, address: str = ADDRESS) -> socket.socket:
    """A socket at one address for the store of the rendezvous.

    Bound here, so no one can take the port before rank 0 is up.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port or 0))
        listener.listen(backlog)
    except (OSError, OverflowError) as error:
        listener.close()
        raise LaunchError(_why_no_port(port, address, error)) from error
    return listener


def _why_no_port(port: int | None, address: str, error: OSError | OverflowError) -> str:
    advice = "Give another port, or none for a free one"
    if isinstance(error, OverflowError):
        return f"port {port} does not exist: ports go from 1 to 65535. {advice}."
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {address} is in use by {_listener_of(port)}. {advice}, or end that process."
    return f"port {port or '(any)'} on {address} cannot be opened: {error.strerror}. {advice}."


def _listener_of(port: int | None) -> str:
    import psutil

    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another process (of another user, or it could not be told)"
