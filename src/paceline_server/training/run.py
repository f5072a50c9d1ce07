"""Processes of a run with servers: workers first, then servers."""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from paceline.cluster.machine import own_address
from paceline.comm import Group
from paceline.comm.backend import joined
from paceline.device import use
from paceline.elastic.membership import announced
from paceline.engine.calls import sparse_tables
from paceline.engine.engine import RankEngine
from paceline.errors import LaunchError, ServerRefused
from paceline.job.job import Job
from paceline.job.partition import Partition
from paceline.planning.plan import Plan
from paceline.planning.sync_info import ServerProcesses, SyncSpec
from paceline.rank_environment import RankEnvironment
from paceline.run.build import build_engine, built, check_device, seed_all
from paceline.run.process import stop_signals
from paceline.run.record.run import Run
from paceline.split.layout import whole_parts
from paceline.sync.compress.alone import Feedback, decoder
from paceline.wire.key import RunKey, name_of, own_key
from paceline.wire.status import Generation, StatusBoard, watch_generation
from paceline.wire.store import StoreClient
from paceline_server.client import place_of
from paceline_server.parameters.client import ServerClient
from paceline_server.parameters.log import View, Views
from paceline_server.parameters.process import GRACE_S, ParameterServer
from paceline_server.parameters.settings import ServerSettings, TensorSpec
from paceline_server.training.loop import BEGIN, FirstWorker
from paceline_server.training.pieces import Pieces, Rounds, next_boundary
from paceline_server.training.whole import Whole
from paceline_server.training.worker import Worker

SETTINGS, ENDED, ADDRESS = "served/settings", "served/ended", "served/address"  # keys of the run's store
_LOOK_S = 0.02  # interval at which a worker checks if a boundary has ended
_START_S = 300.0  # time in which the first worker and the servers must start; the launcher monitors each process
_DEALT_AGAIN_S = 2 * GRACE_S  # time after the end of a hanging worker until another worker gets the piece
_ALIVE_S = 0.25  # interval of a server's heartbeat and of its membership check


def run_rank(arguments: list[str]) -> None:
    """Run a worker or a server of the run in the directory `arguments[0]`."""
    run, environment = Run(arguments[0]), RankEnvironment.from_env()
    # every attempt of the run has its own store
    assert environment.store is not None
    with closing(StoreClient(place_of(environment.store), own_key(), run.job.deadline_s)) as store:
        if environment.rank >= run.plan.ranks:
            _serve(run, store, environment)
        else:
            _work(run, store, environment)


def _serve(run: Run, store: StoreClient, environment: RankEnvironment) -> None:
    """Serve a part until the launcher ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    board, servers = StatusBoard.of_this_rank(), ServerProcesses.of(run.plan.sync)
    number = environment.rank - run.plan.ranks
    part = number // servers.each
    settings = read(store.get(SETTINGS, _START_S))
    if servers.each == 1 and store.check([f"{ADDRESS}/{number}"]):
        raise LaunchError(
            "server.lost_without_backup",
            "server {server} was lost and has no backup. --resume continues from the newest checkpoint. With "
            "backup=on in the plan's sync, each server has a second process.",
            server=part,
        )
    with ExitStack() as held:
        key, where = _key_and_place(environment)
        decode = None if settings.compress == "none" else decoder(settings.compress)
        views = Views(store, _view_key(part)) if servers.each > 1 else None
        if views is not None:
            _vacate(store, views, number)
        server = held.enter_context(
            ParameterServer(where, key, settings, part=part, servers=servers.parts, views=views, decode=decode)
        )
        store.set(f"{ADDRESS}/{number}", name_of(server.address).encode())
        assert environment.status_file is not None
        folder, generation = environment.status_file.parent, Generation(-1, ())
        while not server.ended.wait(_ALIVE_S):
            # only the deadline limits the wait for "done"; signals do not end this wait
            board.mark("done", 0)
            if board.current_generation != generation.number and (found := announced(folder, board.current_generation)):
                generation = found
                _expel(server, run, generation)


def _vacate(store: StoreClient, views: Views, number: int) -> None:
    """Remove a lost predecessor that is recorded as the server's only primary.

    Otherwise both processes of the server would wait for this predecessor forever. This happens only before the run
    begins, when no parameters can be lost.
    """
    key = f"{ADDRESS}/{number}"
    if not store.check([key]) or store.check([BEGIN]):
        return
    view = views.read()
    if view is not None and view.addresses() == [store.get(key).decode()]:
        views.replace(view, View(view.generation + 1, ""))


def _expel(server: ParameterServer, run: Run, generation: Generation) -> None:
    firsts = range(0, run.plan.ranks, run.plan.ranks // run.plan.dp)
    for first in firsts:
        if first not in generation.members:
            with suppress(ServerRefused):
                server.expel(_name(first))


def _name(first: int) -> str:
    return f"rank {first}"


def _work(run: Run, store: StoreClient, environment: RankEnvironment) -> None:
    """Compute pieces until the run ends or this worker must leave.

    The first worker also evaluates, saves and records.
    """
    leaves = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: leaves.set())  # `elastic/independent.py:LEAVE`
    job, number = run.job, environment.rank // (run.plan.ranks // run.plan.dp)
    with _own_group(run, environment, number) as group, ExitStack() as held:
        check_device(run, group)
        plan = replace(run.plan, dp=1)
        model = built(job, plan)
        data = job.data.build(input_shape=job.model.input_shape(), seed=job.seed)
        engine = build_engine(job, plan, model, data, group)
        held.callback(engine.close)
        own = engine.data_group
        seed_all(job.seed * 1_000_003 + 1 + number * own.size + own.rank)
        whole = Whole(group, _trained(engine), engine.parts or whole_parts(engine.model))
        if environment.rank == 0:
            tensors = tensors_of(engine.model, whole, SyncSpec.parse(run.plan.sync).period)
            store.set(SETTINGS, written(settings_of(job, run.plan, tensors, _total_steps(job, engine))))
        client = None
        if group.rank == 0:
            client = held.enter_context(_client(run, store, _name(environment.rank)))
            client.join()
        pieces = Pieces(job, _partition(engine), run.plan.dp, own.rank, own.size)
        worker = Worker(engine, client, pieces, whole, lambda: _rounds(run, engine, store))
        if number == 0:
            FirstWorker(run, worker, data, group, store).run()
            store.set(ENDED, b"1")
        else:
            _work_until(worker, leaves, lambda: store.check([ENDED]))
        if client is not None:
            client.leave()
        engine.on_phase("done", engine.step_count)


def _work_until(worker: Worker, leaves: threading.Event, ended: Callable[[], bool]) -> None:
    """Compute pieces, and wait for the first worker at boundaries."""
    with stop_signals(lambda name: None):  # the first worker ends the run for all workers
        while not worker.whole.share(leaves.is_set()):
            if worker.advance() is None:
                if worker.whole.share(ended()):
                    return
                time.sleep(_LOOK_S)


@contextmanager
def _own_group(run: Run, environment: RankEnvironment, worker: int) -> Iterator[Group]:
    """Form the group of this worker's ranks.

    The ranks start together, even after one rank was lost: the launcher then ends the other ranks, and this call waits
    for their end.
    """
    size, deadline_s = run.plan.ranks // run.plan.dp, _patience_s(run)
    if size == 1:
        yield Group(device=use(environment.local_rank), deadline_s=deadline_s)
        return
    met = Generation(1 + worker + environment.starts * run.plan.dp, tuple(range(worker * size, (worker + 1) * size)))
    with (
        watch_generation(lambda: False),
        joined(deadline_s=deadline_s, transport=run.plan.transport, generation=met) as group,
    ):
        yield group


def _trained(engine: RankEngine) -> dict[str, nn.Parameter]:
    return {name: p for name, p in engine.named_parameters().items() if p.requires_grad}


def _rounds(run: Run, engine: RankEngine, store: StoreClient) -> Rounds:
    """Return the batches of each ticket, which are the same for all workers."""
    job, period = run.job, SyncSpec.parse(run.plan.sync).period
    epoch_steps, total_steps = _partition(engine).steps_per_epoch, _total_steps(job, engine)
    # without rounds, tickets follow the number of batches, which the servers' schedule counts
    begin = 0 if period == 1 else int(store.get(BEGIN, _START_S))
    return Rounds(period, begin, lambda step: next_boundary(job, epoch_steps, total_steps, step))


def _total_steps(job: Job, engine: RankEngine) -> int | None:
    return job.stop.total_steps(_partition(engine).steps_per_epoch)


def _partition(engine: RankEngine) -> Partition:
    assert isinstance(engine.loader.partition, Partition)
    return engine.loader.partition


def _client(run: Run, store: StoreClient, name: str) -> ServerClient:
    servers = ServerProcesses.of(run.plan.sync)
    settings = read(store.get(SETTINGS, _START_S))
    keys = [f"{ADDRESS}/{number}" for number in range(servers.processes)]
    places = [place_of(told.decode()) for told in store.get_all(keys, _START_S)]
    parts = [places[i : i + servers.each] for i in range(0, len(places), servers.each)]
    key = own_key() if any(isinstance(place, tuple) for place in places) else None
    encode = None if settings.compress == "none" else Feedback(settings.compress, seed=secrets.randbits(32)).encode
    deadline_s, patience_s = run.job.deadline_s, _patience_s(run)
    views = [Views(store, _view_key(part)) for part in range(len(parts))] if servers.each > 1 else ()
    return ServerClient(
        parts,
        key,
        name=name,
        settings=settings,
        deadline_s=deadline_s,
        patience_s=patience_s,
        views=views,
        encode=encode,
    )


def _view_key(part: int) -> str:
    return f"served/view/{part}"


def _patience_s(run: Run) -> float:
    """Return the longest wait for a piece that another worker computes.

    The launcher monitors the other worker, allows the deadline for each step, and restarts the worker if it hangs.
    """
    return SyncSpec.parse(run.plan.sync).period * run.job.deadline_s + _DEALT_AGAIN_S


def _key_and_place(environment: RankEnvironment) -> tuple[RunKey | None, tuple[str, int] | Path]:
    """Return a server's key and address: TLS between hosts, otherwise a Unix socket."""
    if environment.store is None or not environment.store.startswith("/"):
        return own_key(), (own_address(), 0)
    assert environment.error_file is not None
    # in the launcher's folder, which is deleted after the attempt
    return None, environment.error_file.with_name(f"server-{os.getpid()}")


# keys of a schedule that count global batches; servers count pushes instead
_COUNTED = ("warmup_steps", "decay_steps")


def settings_of(job: Job, plan: Plan, tensors: tuple[TensorSpec, ...], total_steps: int | None) -> ServerSettings:
    """Return the settings of a run's servers, which own these tensors.

    A push is the mean gradient of a piece. Its weight is the piece's share of the global batch, so the learning rate is
    the job's learning rate divided by `pieces`. With a period, a push is a parameter change, and the optimizer is the
    outer optimizer.
    """
    pieces, spec = plan.dp, SyncSpec.parse(plan.sync)
    staleness = float(spec.arguments["staleness"])
    if spec.period > 1:
        steps: dict[str, Any] = {"optimizer": _outer(pieces, spec.arguments)}
    else:
        steps = _of_gradients(job, pieces, total_steps)
    return ServerSettings(
        tensors=tensors,
        **steps,
        staleness=staleness,
        pieces=pieces,
        compress=plan.compress,
    )


def _outer(pieces: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Scale the outer optimizer to step on every push instead of once per round.

    The pushes of a round together decay the momentum as much as one outer step. A constant change moves the parameters
    as far as in one outer step.
    """
    decay = arguments["momentum"] ** (1 / pieces)
    rate = arguments["lr"] / pieces * (1 - decay) / (1 - arguments["momentum"])
    return {"name": "sgd", "lr": rate, "momentum": decay, "nesterov": decay > 0}


def _of_gradients(job: Job, pieces: int, total_steps: int | None) -> dict[str, Any]:
    """Return the job's optimizer, schedule and number of steps, scaled to pushes of gradients."""
    optimizer = job.optimizer.model_dump(exclude_defaults=True) | {"lr": job.optimizer.lr / pieces}
    schedule = job.schedule.model_dump(exclude_defaults=True)
    schedule |= {key: schedule[key] * pieces for key in _COUNTED if schedule.get(key)}
    if "milestones" in schedule:
        schedule["milestones"] = [milestone * pieces for milestone in schedule["milestones"]]
    steps = None if total_steps is None else total_steps * pieces
    return {"optimizer": optimizer, "schedule": schedule, "total_steps": steps}


def tensors_of(model: nn.Module, whole: Whole, period: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of a worker's model that servers own.

    Embedding tables are sparse, except if the model is divided or the rule has a period.

    Raises:
        ServerRefused: servers do not support the type of a parameter.
    """
    sparse = set[str]() if whole.divides or period > 1 else set(sparse_tables(model))
    return tuple(
        TensorSpec(name, shape, str(whole.dtypes[name]).removeprefix("torch."), sparse=name in sparse)
        for name, shape in whole.shapes.items()
    )


def written(settings: ServerSettings) -> bytes:
    """Return settings as JSON."""
    return json.dumps(asdict(settings)).encode()


def read(text: bytes) -> ServerSettings:
    """Read settings from the JSON that `written` returned."""
    return msgspec.convert(json.loads(text), ServerSettings)
