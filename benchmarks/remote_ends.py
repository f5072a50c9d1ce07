"""Ends of an echo, one process each, by paceline, torch's RPC, pyzmq or gRPC.

    remote_ends.py serve|call SYSTEM SETTINGS

SETTINGS is JSON. A serving end prints its port, or 0, and serves until its standard input ends. A calling end prints a
line when it has connected; then it answers each line of its standard input, {"bytes": …, "calls": …}, with the seconds
that each call took, after it has seen that what came back is what it sent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Settings = dict[str, Any]
Echo = Callable[[Tensor], Tensor]
_WARM_CALLS = 3


def main() -> None:
    """Serve or call, as the command line says."""
    role, system, text = sys.argv[1:]
    settings: Settings = json.loads(text)
    torch.set_num_threads(1)
    serve, call = SYSTEMS[system]
    if role == "serve":
        with serve(settings) as port:
            print(port, flush=True)
            sys.stdin.read()
    else:
        with call(settings) as echo:
            print("connected", flush=True)
            for line in sys.stdin:
                print(json.dumps(timed(echo, **json.loads(line))), flush=True)


def timed(echo: Echo, bytes: int, calls: int) -> list[float]:
    """Seconds of each call."""
    sent = torch.rand(bytes // 4)
    for _ in range(_WARM_CALLS):
        if not torch.equal(echo(sent), sent):
            raise ValueError("what came back is not what was sent")
    took_s = []
    for _ in range(calls):
        begin = time.perf_counter()
        echo(sent)
        took_s.append(time.perf_counter() - begin)
    return took_s


@contextmanager
def serve_paceline(settings: Settings) -> Iterator[int]:
    """Over a Unix socket in the folder, or over TLS with the run's key."""
    from paceline.wire.key import read_key
    from paceline_server.service import Service
    from paceline_server.talk import quick

    def echo(_: Any, value: Tensor) -> Tensor:
        return value

    if address := settings.get("address"):
        service = Service((address, 0), read_key(Path(settings["key"])), {"echo": quick(echo)})
    else:
        service = Service(Path(settings["folder"]) / "paceline", None, {"echo": quick(echo)})
    with service:
        yield service.address[1] if isinstance(service.address, tuple) else 0


@contextmanager
def call_paceline(settings: Settings) -> Iterator[Echo]:
    """The other end."""
    from paceline.wire.key import read_key
    from paceline_server.client import Client

    if address := settings.get("address"):
        client = Client((address, settings["port"]), read_key(Path(settings["key"])))
    else:
        client = Client(Path(settings["folder"]) / "paceline", None)
    with client:
        yield lambda tensor: client.call("echo", tensor)


def echo(tensor: Tensor) -> Tensor:
    """The argument; torch's RPC names it by import path."""
    return tensor


@contextmanager
def torch_rpc(settings: Settings, rank: int) -> Iterator[Any]:
    """One of the two processes of torch's RPC."""
    from torch.distributed import rpc

    sys.path.insert(0, str(Path(__file__).parent))
    where = f"tcp://{settings.get('address', '127.0.0.1')}:{settings['store_port']}"
    rpc.init_rpc(
        f"end{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=where)
    )
    yield rpc
    rpc.shutdown(graceful=False)


@contextmanager
def serve_torch_rpc(settings: Settings) -> Iterator[int]:
    """The answering end; both meet before either goes on, so that the port is said before."""
    print(0, flush=True)
    with torch_rpc(settings, 0):
        yield 0


@contextmanager
def call_torch_rpc(settings: Settings) -> Iterator[Echo]:
    """The other end."""
    with torch_rpc(settings, 1) as rpc:
        from remote_ends import echo as named

        yield lambda tensor: rpc.rpc_sync("end0", named, args=(tensor,))


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.numpy().data.cast("B")
    return data


@contextmanager
def serve_pyzmq(settings: Settings) -> Iterator[int]:
    """A REP socket, in a thread; buffers are not copied by Python."""
    import threading

    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.REP)
    socket.bind(f"ipc://{settings['folder']}/pyzmq")

    def run() -> None:
        try:
            while True:
                tensor = torch.frombuffer(bytearray(socket.recv(copy=False).buffer), dtype=torch.float32)
                socket.send(_bytes_of(tensor), copy=False)
        except zmq.ZMQError:
            return

    threading.Thread(target=run, daemon=True).start()
    yield 0
    os._exit(0)


@contextmanager
def call_pyzmq(settings: Settings) -> Iterator[Echo]:
    """A REQ socket."""
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.connect(f"ipc://{settings['folder']}/pyzmq")

    def call(tensor: Tensor) -> Tensor:
        socket.send(_bytes_of(tensor), copy=False)
        return torch.frombuffer(bytearray(socket.recv(copy=False).buffer), dtype=torch.float32)

    yield call
    context.destroy(linger=0)


_GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_GRPC_METHOD = "/benchmark/echo"


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _from_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


@contextmanager
def serve_grpc(settings: Settings) -> Iterator[int]:
    """A server over a Unix socket, or over TLS where the client proves a certificate, too."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    method = grpc.unary_unary_rpc_method_handler(lambda tensor, _: tensor, _from_bytes, _to_bytes)
    server = grpc.server(ThreadPoolExecutor(8), options=_GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark", {"echo": method}),))
    if address := settings.get("address"):
        key, certificate = (Path(settings[name]).read_bytes() for name in ("grpc_key", "grpc_certificate"))
        proof = grpc.ssl_server_credentials([(key, certificate)], certificate, require_client_auth=True)
        port = server.add_secure_port(f"{address}:0", proof)
    else:
        port = server.add_insecure_port(f"unix:{settings['folder']}/grpc")
    server.start()
    yield port
    server.stop(0)


@contextmanager
def call_grpc(settings: Settings) -> Iterator[Echo]:
    """The other end."""
    import grpc

    if address := settings.get("address"):
        key, certificate = (Path(settings[name]).read_bytes() for name in ("grpc_key", "grpc_certificate"))
        proof = grpc.ssl_channel_credentials(certificate, key, certificate)
        named = [*_GRPC_OPTIONS, ("grpc.ssl_target_name_override", "benchmark")]
        channel = grpc.secure_channel(f"{address}:{settings['port']}", proof, options=named)
    else:
        channel = grpc.insecure_channel(f"unix:{settings['folder']}/grpc", options=_GRPC_OPTIONS)
    with channel:
        yield channel.unary_unary(_GRPC_METHOD, _to_bytes, _from_bytes)


SYSTEMS: dict[str, tuple[Callable[[Settings], Any], Callable[[Settings], Any]]] = {
    "paceline": (serve_paceline, call_paceline),
    "torch_rpc": (serve_torch_rpc, call_torch_rpc),
    "pyzmq": (serve_pyzmq, call_pyzmq),
    "grpc": (serve_grpc, call_grpc),
}

if __name__ == "__main__":
    main()
