"""Ray: a job on a running cluster, whose driver starts one actor per host.

The driver inside the job is `python -m paceline.elastic.submit.ray --num-hosts 2 -- train job.yaml …`. When a host is
lost, the other hosts end. Once enough hosts are available, all hosts start again from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from paceline.cluster.launch_engines import COORDINATOR, ENGINE, HOST_NUMBER, HOSTS
from paceline.elastic.failure import StopSignals, stopped_before
from paceline.elastic.rank import PR_SET_PDEATHSIG
from paceline.elastic.submit.scheduler import Phase, Request, Scheduler, State, Submission, ask, show
from paceline.errors import LaunchError, PacelineError
from paceline.rank_environment import KEY_FD, KEY_FILE
from paceline.wire.key import RunKey, key_descriptor

_ADVICE = 'Install it: pip install "ray[default]", of the version that the cluster has.'
_ADDRESS = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_STOP_S = 120  # seconds after SIGTERM for the last step and a checkpoint; Ray's default is 3 s
_POLL_S = 2.0
_PHASES: dict[str, Phase] = {
    "PENDING": "queued",
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "STOPPED": "cancelled",
    "FAILED": "failed",
}


class Ray(Scheduler):
    """Ray cluster that runs submissions as jobs."""

    name = "ray"
    options: ClassVar = {
        "address": "of the cluster, e.g. http://head:8265 (default: RAY_ADDRESS)",
        "cpus": "CPUs that each host's actor asks for (default: 1)",
        "gpus": "GPUs that each host's actor asks for (default: 0)",
        "key": "file of a key of `paceline key`, the same on every host (default: a new one, which Ray carries)",
        "python": "Python that has paceline and ray, on the cluster (default: python)",
    }

    def text(self, request: Request) -> str:
        return shlex.join(self._command(request)) + "\n"

    def _command(self, request: Request) -> list[str]:
        driver = [
            request.options.get("python", "python"),
            "-m",
            "paceline.elastic.submit.ray",
            "--num-hosts",
            str(request.hosts),
        ]
        for name in ("cpus", "gpus"):
            if (count := request.options.get(name)) is not None:
                if not (count.isascii() and count.isdecimal()):
                    raise LaunchError(
                        "submit.not_a_count",
                        "--scheduler-option {name}={value}: give a whole number",
                        name=name,
                        value=count[:40],
                    )
                driver += [f"--{name}", count]
        if (key := request.options.get("key")) is not None:
            if not key.startswith("/"):
                raise LaunchError(
                    "submit.key_not_absolute",
                    "--scheduler-option key={key}: give the absolute path of the key file on the hosts",
                    key=key[:80],
                )
            driver += ["--key", key]
        environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S), "RAY_DEDUP_LOGS": "0"}}
        options = ["--submission-id", request.name, "--no-wait", "--runtime-env-json", json.dumps(environment)]
        return [
            *("ray", "job", "submit", *_address(request.options.get("address"))),
            *(*options, "--", *driver, "--", *request.train_arguments()),
        ]

    def submit(self, request: Request) -> str:
        ask(self._command(request), _ADVICE)
        return request.name

    def state(self, submission: Submission) -> State:
        command = ["ray", "job", "status", *_address(submission.options.get("address")), submission.id]
        answer = ask(command, _ADVICE)
        found = re.search(rf"\b({'|'.join(_PHASES)})\b|\b({'|'.join(map(str.lower, _PHASES))})\b", answer)
        if found is None:
            return State("unknown", note="`ray job status` answers in a form that is not known")
        phase = _PHASES[found[0].upper()]
        code = re.search(r"exit code (\d{1,3})\b", answer) if phase == "failed" else None
        return State(phase, int(code[1]) if code else None)

    def follow(self, submission: Submission) -> State:
        log = ["ray", "job", "logs", "--follow", *_address(submission.options.get("address")), submission.id]
        while not (state := self.steady_state(submission)).ended and state.phase != "unknown":
            if state.phase == "queued" or show(log, _ADVICE):
                time.sleep(_POLL_S)
        return state

    def cancel(self, submission: Submission) -> None:
        ask(["ray", "job", "stop", "--no-wait", *_address(submission.options.get("address")), submission.id], _ADVICE)


def _address(given: str | None) -> list[str]:
    if given is not None:
        return ["--address", given]
    if not any(os.environ.get(name) for name in _ADDRESS):
        raise LaunchError(
            "submit.ray_address_missing",
            "the address of the Ray cluster is missing. Set --scheduler-option address=http://HEAD:8265, "
            "or RAY_ADDRESS. paceline does not start a cluster; use `ray start --head`.",
        )
    return []


_MOST_LOST = 20  # number of attempts with a lost host after which the run fails
_PLACED_S = 1_800.0  # longest wait until enough hosts are available
_TOLD_EVERY_S = 30.0
_OTHERS_END_S = 120.0  # time for the other host processes to end after the first has ended
_BECOME = "--become"


def main(arguments: list[str]) -> int:
    """Run a command of paceline on several hosts, and return its exit code."""
    if arguments[:1] == [_BECOME]:
        _become(arguments[1:])
    parser = argparse.ArgumentParser(prog="paceline.elastic.submit.ray")
    parser.add_argument("--num-hosts", type=int, required=True)
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--key", help="file of the run's key on every host; without it Ray carries a new key to them")
    parser.add_argument("command", nargs="+")
    wanted = parser.parse_args(arguments)
    import ray

    ray.init(address="auto")  # connects to the cluster of this job, and does not start a cluster
    if wanted.num_hosts > 1 and wanted.key is None and os.environ.get("RAY_USE_TLS") != "1":
        _say(
            "note: Ray hands the run's key to its actors in plaintext. RAY_USE_TLS=1 encrypts what Ray sends; "
            "--scheduler-option key=FILE names a key that every host has already."
        )
    try:
        with StopSignals() as stop:
            return _until_no_host_is_lost(wanted, stop)
    except PacelineError as error:
        _say(str(error))
        return error.exit_code
    finally:
        ray.shutdown()


def _until_no_host_is_lost(wanted: argparse.Namespace, stop: StopSignals) -> int:
    resources = {"CPU": wanted.cpus} | ({"GPU": wanted.gpus} if wanted.gpus else {})
    for _ in range(_MOST_LOST):
        with _actors(wanted.num_hosts, resources, stop) as actors:
            codes = _run(actors, wanted, stop)
        if stop.first or None not in codes:
            return next((code for code in codes if code), 0)
        lost = ", ".join(str(number) for number, code in enumerate(codes) if code is None)
        _say(f"Ray has lost host {lost}; starting again from the newest checkpoint")
    raise LaunchError(
        "submit.hosts_lost",
        "a host was lost in each of {times} attempts. The logs of the cluster may show the cause.",
        times=_MOST_LOST,
    )


@contextmanager
def _actors(hosts: int, resources: dict[str, int], stop: StopSignals) -> Iterator[list[Any]]:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([resources] * hosts, strategy="STRICT_SPREAD")
    try:
        _await_hosts(group, hosts, resources, stop)
        actor = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), max_concurrency=2)(HostActor)
        yield [
            actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
            for bundle in range(hosts)
        ]
    finally:
        remove_placement_group(group)  # this also ends the actors


def _await_hosts(group: Any, hosts: int, resources: dict[str, int], stop: StopSignals) -> None:
    import ray

    begun = told = time.monotonic()
    while not ray.wait([group.ready()], timeout=1)[0]:
        now = time.monotonic()
        there = sum(node["Alive"] for node in ray.nodes())
        each = " and ".join(f"{count} {name}" for name, count in resources.items())
        what = f"{hosts} hosts with {each} each that are free; the cluster has {there} hosts of all kinds"
        if stop.first:
            raise stopped_before(f"there were {what}", stop.first)
        if now - begun > _PLACED_S:
            raise LaunchError(
                "submit.ray_timeout",
                "gave up after waiting {waited_s:.0f} s for {what}",
                waited_s=now - begun,
                what=what,
            )
        if now - told > _TOLD_EVERY_S:
            told = now
            _say(f"waiting for {what}")


def _run(actors: list[Any], wanted: argparse.Namespace, stop: StopSignals) -> list[int | None]:
    """Run the host processes; return their exit codes, with None for a lost host."""
    import ray

    key = None if wanted.key else RunKey.make().to_pem()
    try:
        address, port = ray.get(actors[0].address.remote(), timeout=_OTHERS_END_S)
    except ray.exceptions.RayError:
        return [None] * len(actors)
    together = {HOSTS: str(len(actors)), COORDINATOR: f"{address}:{port}", ENGINE: "ray"}
    if wanted.key:
        together[KEY_FILE] = wanted.key
    waiting = {
        actor.run.remote(wanted.command, together | {HOST_NUMBER: str(number)}, key): number
        for number, actor in enumerate(actors)
    }
    codes: list[int | None] = [1] * len(actors)
    stopped, until = False, float("inf")
    while waiting and time.monotonic() < until:
        for ref in ray.wait(list(waiting), timeout=0.5)[0]:
            number = waiting.pop(ref)
            try:
                codes[number] = ray.get(ref)
            except ray.exceptions.RayActorError:  # the other hosts lose this host, and end
                codes[number] = None
            until = min(until, time.monotonic() + _OTHERS_END_S)
        if stop.first and not stopped:
            stopped = True
            _say(f"{stop.first}: the run saves and ends")
            for actor in actors:
                actor.stop.remote()
    return codes


class HostActor:
    """Ray actor that runs the host process of one host."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def address(self) -> tuple[str, int]:
        """Return this host's address in the cluster, and a free port at it."""
        import ray

        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))
            return f"[{address}]" if ":" in address else address, probe.getsockname()[1]

    def run(self, command: list[str], environment: dict[str, str], key_pem: bytes | None) -> int:
        """Run the host process until it ends; return its exit code.

        Args:
            key_pem: the run's key; None if the environment names a key file.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", KEY_FILE)}
        keys = [] if key_pem is None else [key_descriptor(RunKey.from_pem(key_pem))]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.elastic.submit.ray", _BECOME, *command],
                env={**inherited, **environment, **({KEY_FD: str(keys[0])} if keys else {})},
                pass_fds=keys,
                stdin=subprocess.DEVNULL,
            )
        finally:
            for key in keys:
                os.close(key)
        if self._stopped:
            self._process.terminate()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """Ask the host process to save a checkpoint and end."""
        self._stopped = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()


def _become(command: list[str]) -> None:
    """Replace this process with the host process, which receives SIGTERM when its actor dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-m", "paceline", *command])


def _say(text: str) -> None:
    print(f"paceline: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
