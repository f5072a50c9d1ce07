"""`paceline.train`: train a job, on this machine or under torchrun."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from paceline.cluster.cluster import Cluster
from paceline.cluster.emulate import LinkBytes
from paceline.cluster.launch_engines import HOST_DEVICES, is_rank
from paceline.console import Console as SafeConsole
from paceline.deferred_compiler import defer_compiler
from paceline.elastic.attempt import launch, places_on
from paceline.elastic.forkserver import warm_up
from paceline.elastic.hosts.hosts import Hosts, NextGeneration, RunFolder, Takeover, current_hosts
from paceline.elastic.hosts.over_hosts import must_agree, over_hosts
from paceline.elastic.hosts.takeover import tell_successors
from paceline.elastic.leadership import RunLock
from paceline.elastic.place import RankPlace, cores_on, recovers_in_place, recovery_is_on, with_servers
from paceline.elastic.ranks import Setting
from paceline.elastic.run_on_ranks import warm_up_for
from paceline.errors import JobError, LaunchError, RunError
from paceline.files import private_folder
from paceline.job.job import Job
from paceline.job.loss import Metric, build_metrics
from paceline.job.stop import HIGHER_IS_BETTER, Epochs, StopRule, higher_is_better
from paceline.planning.arguments import AnyCluster, AnyJob, AnyPlan, cluster_to_run_on, job_of, plan_of, plan_or_auto
from paceline.planning.check.plan_errors import plan_errors, refuse, warnings_about
from paceline.planning.plan import Plan, threads_on
from paceline.planning.sync_info import ServerProcesses, sync_info
from paceline.rank_environment import is_our_rank
from paceline.run.dry_run import refuse_what_cannot_divide
from paceline.run.health import check_cluster, refuse_unhealthy
from paceline.run.out_of_memory import add_table
from paceline.run.process import fail
from paceline.run.record.progress import LiveProgress
from paceline.run.record.run import DESCRIPTION, FOLDERS, JsonLines, Run
from paceline.run.trackers.follow import RunTrackers, check_trackers
from paceline.run.tuning.auto import AutoChoice, Say, choose, remember_run
from paceline.storage.url import is_url
from paceline.text import nearest

if TYPE_CHECKING:
    from paceline.comm import Group
    from paceline.run.object_store import RemoteRun

RUNS = Path("runs")  # default folder, in the current directory


def train(
    job: AnyJob,
    plan: AnyPlan = "auto",
    *,
    cluster: AnyCluster | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    port: int | None = None,
    restarts: int = 0,
    health: bool = False,
    console: Console | None = None,
) -> Run:
    """Train a job until its stop rule ends it, and return the record.

    Without a launcher, this function starts the plan's ranks on this machine, or on hosts emulated on it, and watches
    them. If torchrun started the ranks, every rank calls this function.

    Args:
        job: a `Job`, its YAML file, or the file's URL.
        plan: a `Plan`, its text, or `"auto"`. `auto` predicts the fastest plans and chooses the best of them. It
            measures these plans for a few seconds if the run is long enough, or reuses measurements of an earlier
            start. With `auto`, a resumed run keeps its plan if the plan still fits. Under torchrun, `auto` always
            means one replica per rank.
        cluster: a `Cluster`, or the YAML file of one; None means this machine. A name from the catalogue of hardware
            is only for planning.
        run: directory of the run, or its URL in an object store (`s3://bucket/name`). For a URL, the run is written to
            a local directory and uploaded during training. None makes `runs/<job>-<time>` in the current directory.
        resume: whether to continue `run`, or the job's newest run if `run` is None. If there is no run, a new run
            starts.
        port: port of the rendezvous on the first host; None takes a free port.
        restarts: maximum number of restarts of a failed run per hour, each from the newest checkpoint.
        health: whether to check the plan's devices and links before the first step, for some seconds.
        console: console that shows progress; None means stderr.

    Returns:
        The record of the run; it is complete when the stop rule has ended the run.

    Raises:
        PacelineError: the job, plan or data is invalid, or a rank failed, hung or was killed. The message has the
            cause and a remedy.

    Example:
        >>> run = paceline.train("job.yaml", "dp=2")
        >>> run.reason
        'steps: 100 done'
    """
    if is_our_rank():
        raise LaunchError(
            "launch.train_in_import",
            'train was called in a rank that only imports the script. Put the call under `if __name__ == "__main__":`.',
        )
    with over_hosts():
        return _train(job, plan, cluster, run, console, resume=resume, port=port, restarts=restarts, health=health)


def _train(
    job: AnyJob,
    plan: AnyPlan,
    cluster: AnyCluster | None,
    run: str | Path | None,
    console: Console | None,
    *,
    resume: bool,
    port: int | None,
    restarts: int,
    health: bool,
) -> Run:
    if not is_rank():
        warm_up()  # the forkserver imports modules while this process reads and checks the job
    hosts = current_hosts()
    if (takeover := hosts.takeover if hosts else None) is not None:
        run, resume, job = takeover.run, True, takeover.job_file or job
    job = job_of(job)
    asked = plan_or_auto(plan, job) or "auto"
    job.model.must_be_at_hand()
    check_trackers(job)
    check_metrics(job)
    job.fetch()
    must_agree(job)
    cluster = hosts.cluster if hosts and cluster is None else cluster_to_run_on(cluster)
    if is_rank():
        defer_compiler()
        return _train_as_rank(job, cluster, asked, run=run, resume=resume, health=health)
    console = console or SafeConsole(stderr=True, soft_wrap=True)
    with ExitStack() as held:
        remote = _remote(run, partial(_note, console), held, resume=resume)
        where = remote.path if remote else run
        record = _train_here(
            job,
            cluster,
            asked,
            where,
            console,
            resume=resume,
            port=port,
            restarts=restarts,
            health=health,
            remote=remote,
        )
        record.url = remote.url if remote else None
        return record


def check_metrics(job: Job) -> None:
    """Refuse metrics that cannot be built, and rules whose metric is missing.

    Raises:
        JobError: a metric or its arguments are invalid, or a watched metric has no known better direction, or the
            schedule expects the opposite direction.
    """
    schedule, metrics = job.schedule, list[Metric]()
    best, patience = job.checkpoint.best, job.stop.patience
    watched = [spec.metric for spec in (best, patience) if spec is not None and spec.mode is None]
    watched += [] if schedule.metric is None else [schedule.metric]
    # do not build the built-in metrics, because that would import torch
    if any(m.args or m.name not in HIGHER_IS_BETTER for m in job.metrics) or set(watched) - HIGHER_IS_BETTER.keys():
        metrics = build_metrics(job.metrics, job.loss.build())
        StopRule(job.stop, Epochs(1), keep=best, metrics=metrics)
        names = ["loss", *(metric.name for metric in metrics)]
        for name, key in job.stop.watched.items():
            if name not in names:
                raise JobError(
                    "job.metric_never_measured",
                    "{key} uses {metric}, which is never measured. {hint}",
                    key=key,
                    metric=name,
                    hint=nearest(name, names),
                )
    if (followed := schedule.metric) is not None:
        mode = cast("str | None", schedule.args.get("mode"))
        known = HIGHER_IS_BETTER.get(followed, False)
        higher = higher_is_better("schedule.metric", followed, mode, metrics) if metrics else known
        if higher and mode is None:
            raise JobError(
                "schedule.mode_missing",
                "schedule ReduceLROnPlateau waits for a smaller {metric} unless its args contain mode: max, but a "
                "larger {metric} is better. Set args: {{mode: max}}.",
                metric=followed,
            )


def _remote(run: str | Path | None, say: Say, held: ExitStack, *, resume: bool) -> RemoteRun | None:
    if not is_url(run):
        return None
    from paceline.run.object_store import RemoteRun

    remote = held.enter_context(RemoteRun(run, say, resume=resume))
    say(f"run {remote.url} · its working directory is {remote.path}")
    return remote


def _train_here(
    job: Job,
    cluster: Cluster,
    plan: AnyPlan,
    run: str | Path | None,
    console: Console,
    *,
    resume: bool,
    port: int | None,
    restarts: int,
    health: bool,
    remote: RemoteRun | None = None,
) -> Run:
    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    say(cluster.describe())
    before = _to_resume(job, run) if resume else None
    takeover = hosts.takeover if (hosts := current_hosts()) else None
    if run is not None and before is None:
        Run.must_be_new(Path(run))  # checked now, before plans are measured
    with ExitStack() as held:
        # This process locks the run's directory until the end: a resumed run's now, a new run's once its path is known.
        note = partial(_note, console)
        lock = held.enter_context(_lock_on(before, takeover, note)) if before else None
        if lock and before and _kept_ranks(hosts):
            _launch_ranks(before, lock, console, port, restarts, remote)
            return before
        if takeover and before:
            plan = _fitted(before.plan, job, cluster) or "auto"
        if hosts and hosts.absent and plan == "auto" and before is None:
            plan = Plan(dp=cluster.devices)
            say(f"plan auto: {plan}, one replica per device: plans are not measured until all hosts have joined")
        choice = choice_of(job, cluster, plan, before, say)
        warm_up_for(job, choice.plan)
        refuse_what_cannot_divide(job, choice.plan, cluster)
        if health and takeover is None:
            for text in refuse_unhealthy(check_cluster(cluster, choice.plan.ranks).report):
                note(f"note: {text}")
        if lock is None:
            lock = held.enter_context(_new_run(Path(run) if run is not None else new_directory(job), note))
        record = _record(job, cluster, choice.plan, lock.run, before)
        say(f"plan {choice.plan} · run {record.path}")
        for text in [
            *warnings_about(choice.plan, job, cluster),
            *(_note_on_idle_hosts(choice.plan, cluster) if current_hosts() else []),
            *(_notes_on_resuming(job, run, before) if resume else []),
        ]:
            note(f"note: {text}")
        try:
            _launch_ranks(record, lock, console, port, restarts, remote)
        except BaseException:
            if before is None:
                record.withdraw_unless_begun()
            raise
        if before is None:
            remember_run(choice, job, cluster, record)
        return record


def _fitted(plan: Plan, job: Job, cluster: Cluster) -> Plan | None:
    """Return the plan with the largest possible number of replicas; None if none fits."""
    fewer = (replace(plan, dp=dp) for dp in range(plan.dp, 0, -1))
    return next((p for p in fewer if p.ranks <= cluster.devices and not plan_errors(job, p, cluster=cluster)), None)


def _note_on_idle_hosts(plan: Plan, cluster: Cluster) -> list[str]:
    per_host = cluster.ranks_per_host(plan.ranks)
    idle = [host.name for host, ranks in zip(cluster.hosts, per_host, strict=True) if not ranks]
    if not idle:
        return []
    each = -(-plan.ranks // len(per_host))
    spread = f", or {HOST_DEVICES}={each} on each" if plan.ranks >= len(per_host) else ""
    return [
        f"plan {plan} fills the hosts in order and leaves no ranks for {', '.join(idle)}. A plan of "
        f"{cluster.devices} ranks uses all hosts{spread}."
    ]


def _notes_on_resuming(job: Job, run: str | Path | None, before: Run | None) -> list[str]:
    if before is None:
        where = f"in {run}" if run else f"of the job {job.name} in {RUNS.resolve()}"
        return [f"there is no run to resume {where}; a new run starts"]
    return [] if before.has_checkpoint else ["this run has no checkpoint; it starts from the beginning"]


def _note(console: Console, text: str) -> None:
    console.print(text, style="yellow", highlight=False, markup=False)


def _launch_ranks(
    record: Run, lock: RunLock, console: Console, port: int | None, restarts: int, remote: RemoteRun | None = None
) -> None:
    job, cluster, plan = record.job, record.cluster, record.plan
    with (
        closing(JsonLines(record.path / "events.jsonl", lossy=True)) as events,
        _places(record, partial(_note_links, events)) as places,
        LiveProgress(record.path, console) as progress,
        RunTrackers(record, partial(_note, console)),
    ):
        events.event("launch", {"ranks": plan.ranks})
        hosts = current_hosts() if cluster.emulate is None else None
        run = remote.url if remote else record.path.resolve()
        if hosts and recovery_is_on():
            tell_successors(hosts, run)
        if hosts and hosts.takeover:
            events.event("coordinator", {"lost": hosts.takeover.lost, "by": hosts.takeover.by})

        def tick() -> None:
            lock.check()
            if remote is not None:
                remote.check()
            progress.tick()

        def note(event: str, details: dict[str, Any]) -> None:
            events.event(event, details)
            if event in ("lost", "host_lost", "host_left", "host_back", "scaled") and hosts:
                tell_successors(hosts, run)

        sync = sync_info(plan.sync)
        recovers = not sync.served and recovers_in_place(job, plan, cluster)
        function = f"paceline.run.recovery.run:{'run_rank' if recovers else 'run_rank_once'}"
        if sync.served:
            function = sync.run_rank
        setting = Setting(
            [function, str(record.path.resolve())],
            places,
            threads=threads_on(cluster, plan),
            pin_cores=None if sync.served else cores_on(cluster, plan),
            deadline_s=job.deadline_s,
            port=port,
            inherited=[lock.fd],
            env=job.fetch(),
            folder=RunFolder(record.path.resolve(), DESCRIPTION, FOLDERS),
            recovers=recovers,
            follows_steps=plan.compile == "off",
            replica_ranks=plan.ranks // plan.dp,
            workers=plan.dp if sync.served else None,
            server_copies=ServerProcesses.of(plan.sync).each if sync.served else 1,
        )
        adopts = _kept_ranks(hosts)
        try:
            launch(setting, restarts=restarts, on_tick=tick, on_event=note, adopts=adopts)
        except LaunchError as failure:
            add_table(failure, record)
            raise


@contextmanager
def _places(record: Run, on_end: Callable[[dict[str, LinkBytes]], None]) -> Iterator[list[RankPlace]]:
    if kept := _kept_ranks(current_hosts()):
        yield kept.places
        return
    plan, cluster = record.plan, record.cluster
    beside = ServerProcesses.of(plan.sync).processes if sync_info(plan.sync).served else 0
    apart = plan.ranks + beside <= cluster.devices
    with places_on(cluster, plan.ranks + beside if apart else plan.ranks, on_end) as places:
        yield with_servers(places, plan) if beside and not apart else places


def _kept_ranks(hosts: Hosts | None) -> NextGeneration | None:
    """Return the ranks that the hosts kept alive when another rank was lost."""
    return hosts.takeover.next_generation if hosts and hosts.takeover else None


def choice_of(
    job: Job, cluster: Cluster, plan: AnyPlan, before: Run | None = None, say: Say | None = None
) -> AutoChoice:
    """Return the requested plan; for `auto`, the resumed run's plan or a new choice.

    Raises:
        PlanError: the plan cannot run the job on the cluster; the message lists every reason.
    """
    if plan == "auto":
        kept = before.plan if before else None  # the same plan continues the run bit for bit
        fits = kept is not None and kept.ranks <= cluster.devices and not plan_errors(job, kept, cluster=cluster)
        return AutoChoice(kept) if kept is not None and fits else choose(job, cluster, say)
    chosen = plan_of(plan)
    refuse(job, chosen, cluster)
    return AutoChoice(chosen)


def _to_resume(job: Job, run: str | Path | None) -> Run | None:
    return Run.newest(RUNS, job.name) if run is None else Run(run) if (Path(run) / "job.yaml").is_file() else None


def _record(job: Job, cluster: Cluster, plan: Plan, path: Path, before: Run | None) -> Run:
    if before is not None:
        before.continue_with(job, cluster, plan)
        return before
    return Run.create(path, job, cluster, plan)


def _lock_on(run: Run, takeover: Takeover | None, say: Say) -> RunLock:
    if takeover and takeover.next_generation:
        return takeover.next_generation.lock
    return RunLock(run.path, say, succeeds=takeover is not None)


def _new_run(path: Path, say: Say, on_lost: Callable[[RunError], object] | None = None) -> RunLock:
    try:
        Run.must_be_new(path)
        private_folder(path)
    except OSError as error:
        raise RunError(
            "run.directory_unwritable",
            "the run cannot be kept in {run}: {reason}. Name a writable directory with --run.",
            run=path,
            reason=error.strerror,
        ) from error
    return RunLock(path, say, on_lost)


def new_directory(job: Job) -> Path:
    """Return the path of a new run directory, named after job and time.

    Raises:
        RunError: the job already has 99 runs from the same second.
    """
    name = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        if not (RUNS / f"{name}{suffix}").exists():
            return RUNS / f"{name}{suffix}"
    raise RunError(
        "run.too_many_of_name",
        "{runs} already contains 99 runs named {name}. Name a directory with --run.",
        name=name,
        runs=RUNS.resolve(),
    )


def _train_as_rank(
    job: Job, cluster: Cluster, plan: AnyPlan, *, run: str | Path | None, resume: bool, health: bool
) -> Run:
    from paceline.comm.backend import joined
    from paceline.comm.measure.health import check
    from paceline.run.recovery.run import train_in

    transport = plan.transport if isinstance(plan, Plan) else "auto"
    with joined(deadline_s=job.deadline_s, transport=transport) as group, ExitStack() as held:
        if health and (notes := refuse_unhealthy(check(group))) and group.rank == 0:
            print(*(f"note: {text}" for text in notes), sep="\n", file=sys.stderr, flush=True)
        record = Run(_agreed_run(group, job, cluster, plan, held, run=run, resume=resume))
        if group.rank == 0:
            held.enter_context(RunTrackers(record, partial(print, file=sys.stderr), shows=True))
        train_in(record, group)
        return record


def _agreed_run(
    group: Group, job: Job, cluster: Cluster, plan: AnyPlan, held: ExitStack, *, run: str | Path | None, resume: bool
) -> str:
    """Return the path of the run directory, which rank 0 finds or creates and locks.

    If rank 0 fails, all ranks raise an error.
    """
    answer: tuple[str | None, str | None] = (None, None)
    if group.rank == 0:
        try:
            chosen = plan if isinstance(plan, Plan) else Plan(dp=group.size)
            refuse(job, chosen, cluster, group.size)
            refuse_what_cannot_divide(job, chosen, cluster, group.size)
            say = partial(print, file=sys.stderr, flush=True)
            remote = _remote(run, say, held, resume=resume)
            run = remote.path if remote else run
            before = _to_resume(job, run) if resume else None
            path = before.path if before else Path(run) if run is not None else new_directory(job)
            held.enter_context(RunLock(path, say, on_lost=fail) if before else _new_run(path, say, on_lost=fail))
            record = _record(job, cluster, chosen, path, before)
            answer = (str(record.path.resolve()), None)
        except Exception as error:
            answer = (None, f"{type(error).__name__}: {error}")
            group.gather_json(answer)
            raise
    path, problem = group.gather_json(answer)[0]
    if problem:
        raise RunError("run.not_prepared", "rank 0 could not prepare the run: {problem}", problem=problem)
    return str(path)


def _note_links(events: JsonLines, carried: dict[str, LinkBytes]) -> None:
    """Write the traffic on the links of emulated hosts, headers included, as an event."""
    events.event("links", {"links": {host: asdict(count) for host, count in carried.items()}})
