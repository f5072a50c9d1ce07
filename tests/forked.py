"""Commands and forkservers in real processes that need not import torch: forks of one that has, the template.

An interpreter for the command `paceline` and one for the forkserver of its ranks take seconds to import what a fork has
at once. What the template forks is a child of this process and leads a session. A command has the environment, the
folder and the descriptors that it is given, as after an exec.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline.cluster.network import call_libc, enter
from paceline.elastic import forkserver as forkservers
from paceline.elastic.forkserver import receive, send
from paceline.rank_environment import RankEnvironment

FORKSERVER = "forkserver"
_IMPORTS = (
    "ranks",
    "paceline.cli",
    "paceline.elastic.hosts.over_hosts",
    "paceline.run.train",
    "paceline.report.run_page",
)
# What a command may have otherwise than the template: no import reads it.
_AFTER_FORK = (
    *("TMPDIR", "XDG_CACHE_HOME", "OMP_NUM_THREADS", "COLUMNS"),
    *("AWS_", "OMPI_", "PACELINE_", "SLURM_"),
    *RankEnvironment.names(),
    *forkservers.AFTER_FORK,
)
_CLONE_NEWNS = 0x00020000
_SIMULATED = "PACELINE_SIMULATED"


class Forked(subprocess.Popen[str]):
    """A `Popen` of the command `paceline` whose process is forked from the template, instead of an interpreter.

    Its arguments may be `-c` and code instead, as of an interpreter, or `FORKSERVER`: then the standard input is its
    socket.

    Args:
        network: path of the network namespace that it is in.
        hidden: a folder that it finds empty.
    """

    def __init__(
        self, args: Sequence[str], network: str | None = None, hidden: Path | None = None, **settings: Any
    ) -> None:
        self._places = {"network": network, "hidden": hidden and str(hidden)}
        super().__init__(args, **settings)

    def _execute_child(  # the one method of a Popen that makes the process
        self, args: list[str], executable: Any, preexec: Any, close: Any, keep: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        pipes = more[3:9]  # for standard input, output and error: the ends to read and to write
        theirs = [pipe if pipe >= 0 else own for own, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        order = {"arguments": args, "folder": str(cwd or os.getcwd()), "environment": dict(env), "parent": os.getpid()}
        self.pid = _template().fork(order | self._places, theirs)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def python(code: str, environment: Mapping[str, str] = {}, **settings: Any) -> subprocess.Popen[str]:
    """A process that runs this code with these variables besides those of now; forked from the template, if it can be.

    Args:
        settings: of a `Popen`.
    """
    settings |= {"env": {**os.environ, "OMP_NUM_THREADS": "1", **environment}, "text": True}
    if can_be_forked(settings["env"]):
        return Forked(["-c", code], **settings)
    return subprocess.Popen([sys.executable, "-c", code], **settings)


def can_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether a command with this environment is one that the template could have become by itself."""
    ours = _template().environment
    other = {name for name, _ in ours.items() ^ environment.items()}
    return not any(name.startswith(_SIMULATED) or not name.startswith(_AFTER_FORK) for name in other)


def share_forkserver() -> None:
    """Have later ranks of this process forked from a forkserver that the template has forked, where it could be one.

    It is there at once, for the environment of now; a forkserver that was displaced by others comes back so.
    """
    variables = {**forkservers.DEFAULTS, **os.environ}
    if forkservers.shared_for(variables) is None and forkservers.why_not() is None and can_be_forked(os.environ):
        forkservers.share(forkservers.Forkserver(variables, _start_forkserver))


def _start_forkserver(_: socket.socket, theirs: socket.socket) -> Forked:
    return Forked([FORKSERVER], stdin=theirs, cwd=os.getcwd(), env=os.environ)


def template_pids() -> list[int]:
    """Process id of the template, once there is one. It stays as long as this process."""
    return [_template().process.pid] if _template.cache_info().currsize else []


class _Template:
    """Handle on the template; it ends with this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                cwd="/",
                env={**environment, **forkservers.ONE_THREAD},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.process.kill)

    def fork(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Process id of a new child of this process that carries out the order."""
        send(self._channel, order, descriptors)
        answer, _ = receive(self._channel)
        assert answer is not None, "the template has ended"
        return int(answer["pid"])


_environment: dict[str, str] = {}


def keep_environment() -> None:
    """Have the template, which the first fork starts, get the environment of now."""
    _environment.update(os.environ)


@functools.cache
def _template() -> _Template:
    return _Template(_environment)


# In the template


def _serve(channel: socket.socket) -> None:
    """Import, then fork on order, as long as the tests run. Returns in forks only, with nothing done."""
    from paceline.deferred_compiler import defer_compiler
    from paceline.elastic import rank

    defer_compiler()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal, for the tests
    unfit = rank.imported(rank.IMPORTS, needed=True) or rank.imported(_modules())
    assert unfit is None, unfit
    while True:
        order, descriptors = receive(channel)
        if order is None:
            os._exit(0)
        reader, writer = os.pipe()
        if (parent := os.fork()) == 0:
            # Its parent ends at once, so that the process which adopts orphans, that of the tests, becomes its parent.
            between = os.getpid()
            if pid := os.fork():
                os.write(writer, str(pid).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            for descriptor in (reader, writer, channel.detach()):
                os.close(descriptor)
            _be(**order, descriptors=descriptors)
        os.waitpid(parent, 0)
        send(channel, {"pid": int(os.read(reader, 20))})
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _modules() -> list[str]:
    from ranks import IMPORTS

    return [*_IMPORTS, *IMPORTS]


def _be(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    parent: int,
    network: str | None,
    hidden: str | None,
    descriptors: list[int],
) -> NoReturn:
    """Be the command, or the forkserver of a parent process, to the end of this process."""
    from paceline.elastic import rank

    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(folder)
        sys.path.insert(0, folder)  # as in a forkserver that is an interpreter
        if arguments == [FORKSERVER]:
            channel, *others = descriptors
            for descriptor in others:
                os.close(descriptor)
            rank.be_a_copy(socket.socket(fileno=channel), parent)
        _enter(network, hidden)
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process
        sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        importlib.invalidate_caches()
        sys.argv[:] = arguments
        if forkservers.why_not() is None:
            rank.split_off()  # before anything here starts a thread
        rank.call_the_process("paceline command")
        if arguments[0] == "-c":
            sys.path[0] = ""
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[0] = str(Path(arguments[0]).parent)
            from paceline.cli import main

            main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter shows it
        sys.excepthook(*sys.exc_info())
    finally:
        rank.end(code)


def _enter(network: str | None, hidden: str | None) -> None:
    """Move this process into a network, and put an empty folder in the place of one for it alone."""
    if network:
        enter(network)
    if hidden:
        call_libc("unshare", _CLONE_NEWNS)
        for words in (("--make-rprivate", "/"), ("-t", "tmpfs", "none", hidden)):
            subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
