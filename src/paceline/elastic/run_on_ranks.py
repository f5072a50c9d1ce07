"""Function calls on ranks, with a typed request and typed results.

All checks, forecasts, trials, calibrations and link measurements on ranks use this module. A rank function is defined
at the top level of a module. Its annotations define the types of the request and the result:

    def square(request: Numbers) -> list[float]: ...

The request and the results are passed as JSON files in a private folder, and are validated against these types. Nothing
is unpickled. The module should import torch inside the function, so that the launcher does not import torch. `launch`
enforces deadlines, reports the error of the first failed rank, and ends all processes.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter

from paceline.cluster.cluster import Cluster
from paceline.deferred_compiler import COMPILER
from paceline.elastic.attempt import launch, places_on
from paceline.elastic.forkserver import warm_up
from paceline.elastic.hosts.hosts import RunFolder
from paceline.elastic.hosts.over_hosts import must_agree
from paceline.elastic.place import RankPlace
from paceline.elastic.ranks import COLLECT_S, Setting
from paceline.errors import LaunchError
from paceline.files import scratch_folder, write_whole
from paceline.job.job import Job
from paceline.job.spec import import_path_of, load_object
from paceline.planning.plan import Plan, threads_on
from paceline.planning.sync_info import sync_info
from paceline.rank_environment import own_rank

Q = TypeVar("Q")
R = TypeVar("R")
RankFunction = Callable[[Q], R] | Callable[[Q, Callable[[R], None]], R] | Callable[[Q, Path], R]
_REQUEST, _PARTIAL = "request.json", "partial.json"


def run_on_ranks(
    function: RankFunction[Q, R],
    request: Q,
    *,
    places: Sequence[RankPlace],
    threads: int = 1,
    deadline_s: float = 60.0,
    start_deadline_s: float = 300.0,
    collect_s: float = COLLECT_S,
    env: Mapping[str, str] = {},
    on_partial: Callable[[R], object] | None = None,
    folder: Path | None = None,
) -> list[R]:
    """Call `function(request)` on one rank per place; return the results in rank order.

    Args:
        function: function at the top level of a module, with annotated types of its parameter and its result.
        places: places of the ranks; see `on_this_machine` and `places_on`.
        threads, deadline_s, start_deadline_s, collect_s, env: see `Setting`.
        on_partial: called in this thread with the newest partial result of rank 0, even if an error is then raised. If
            given, `function` gets a second argument: a function that accepts a partial result.
        folder: private folder, passed as a further argument to `function`. On another host, the argument is an
            initially empty copy, and `fetch` copies a subfolder to that host. Only one call at a time may use the
            folder.

    Raises:
        LaunchError: a rank raised an exception, hung, was killed, or ended without a result.
        SystemExit: with exit code 130 or 143, if SIGINT or SIGTERM arrived during the call.
    """
    signals: list[str] = []

    def note(event: str, details: dict[str, Any]) -> None:
        if event == "stop":
            signals.append(details["signal"])

    request_type, result_type = _types(function)
    more = ["partial"] if on_partial else ["folder"] if folder else []
    with nullcontext(folder) if folder else scratch_folder() as where:
        for earlier in (where / _PARTIAL, *(_file(where, rank) for rank in range(len(places)))):
            earlier.unlink(missing_ok=True)
        (where / _REQUEST).write_text(_encoded(request_type, request))
        partial = _Partial(where / _PARTIAL, result_type, on_partial)
        try:
            setting = Setting(
                [f"{__name__}:be_rank", import_path_of(function), str(where), *more],
                places,
                threads=threads,
                deadline_s=deadline_s,
                start_deadline_s=start_deadline_s,
                collect_s=collect_s,
                saves=False,
                env=env,
                folder=RunFolder(where, (_REQUEST,)),
            )
            launch(setting, on_tick=partial.look, on_event=note)
        finally:
            if signals:
                raise SystemExit(128 + signal.Signals[signals[0]])
            partial.look()
        return [_result(where, rank, result_type) for rank in range(len(places))]


def run_on_plan(
    function: RankFunction[Q, R],
    request: Q,
    *,
    job: Job,
    cluster: Cluster,
    plan: Plan,
    on_partial: Callable[[R], object] | None = None,
    folder: Path | None = None,
) -> list[R]:
    """Call a function on the ranks of a plan, with the deadline of the job. See `run_on_ranks`.

    Raises:
        ClusterError: the hosts of the cluster cannot be emulated on this machine.
    """
    threads = threads_on(cluster, plan)
    must_agree(job)
    warm_up_for(job, plan)
    with places_on(cluster, plan.ranks) as places:
        return run_on_ranks(
            function,
            request,
            places=places,
            threads=threads,
            deadline_s=job.deadline_s,
            on_partial=on_partial,
            folder=folder,
        )


def warm_up_for(job: Job, plan: Plan) -> None:
    """Let the forkserver import the modules that every rank needs for this job and plan."""
    modules = []
    if plan.compile != "off" or plan.splits:
        modules.append(COMPILER)  # this module also imports the parts of torch that splits need
    if plan.splits:
        modules.append("paceline.engine.split_model")
    if run_rank := sync_info(plan.sync).run_rank:
        modules.append(run_rank.partition(":")[0])
    if job.model.hf:
        modules += ["paceline.job.zoo.huggingface", "transformers.modeling_utils"]  # the first silences the second
    warm_up(*modules)


def be_rank(arguments: list[str]) -> None:
    """Call the function in this rank. The arguments are `FUNCTION FOLDER [partial|folder]`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGINT ends the rank, because it has nothing to save
    function, folder = load_object(arguments[0]), Path(arguments[1])
    request_type, result_type = _types(function)
    request = _decoded(request_type, (folder / _REQUEST).read_text())

    def partial(result: Any) -> None:
        if own_rank() == 0:
            write_whole(folder / _PARTIAL, _encoded(result_type, result))

    match arguments[2:]:
        case ["partial"]:
            result = function(request, partial)
        case ["folder"]:
            result = function(request, folder)
        case _:
            result = function(request)
    write_whole(_file(folder, own_rank()), _encoded(result_type, result))


def _types(function: RankFunction[Q, R]) -> tuple[TypeAdapter[Q], TypeAdapter[R]]:
    hints = get_type_hints(function)
    result = hints.pop("return")
    return TypeAdapter(next(iter(hints.values()))), TypeAdapter(result)


def _encoded(kind: TypeAdapter[R], value: R) -> str:
    """Encode a value as JSON that keeps infinity and NaN."""
    return json.dumps(kind.dump_python(value, mode="json"))


def _decoded(kind: TypeAdapter[R], text: str) -> R:
    return kind.validate_python(json.loads(text))


class _Partial(Generic[R]):
    """Reader of rank 0's newest partial result, which passes on every change."""

    def __init__(self, file: Path, kind: TypeAdapter[R], on_partial: Callable[[R], object] | None) -> None:
        self.file, self.kind, self.on_partial = file, kind, on_partial
        self._seen: tuple[int, int] | None = None

    def look(self) -> None:
        """Pass a new partial result to `on_partial`, if there is one."""
        if self.on_partial is None or not self.file.exists():
            return
        about = os.stat(self.file)
        if (about.st_ino, about.st_mtime_ns) != self._seen:
            self._seen = about.st_ino, about.st_mtime_ns
            self.on_partial(_decoded(self.kind, self.file.read_text()))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.json"


def _result(folder: Path, rank: int, kind: TypeAdapter[R]) -> R:
    file = _file(folder, rank)
    if not file.exists():
        raise LaunchError(
            "launch.rank_without_result",
            "rank {rank} ended with exit code 0 before it returned a result. Check whether its code calls exit().",
            rank=rank,
        )
    return _decoded(kind, file.read_text())
