"""`paceline bench compare`: one job under several systems in interleaved runs.

Losses are compared before times.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.cluster.discover import environment
from paceline.cluster.emulate import Emulation
from paceline.elastic.failure import StopSignals
from paceline.elastic.forkserver import ALLOCATOR
from paceline.errors import PacelineError, RunError
from paceline.files import scratch_folder, write_whole
from paceline.job.job import EvaluateSpec, Job
from paceline.job.stop import StopSpec
from paceline.planning.arguments import cluster_to_run_on
from paceline.planning.check.plan_errors import refuse
from paceline.planning.plan import Plan
from paceline.run.tuning.auto import choose
from paceline.units import seconds
from paceline_lab.scaling.protocol import rounds
from paceline_lab.scaling.result import Scaling
from paceline_lab.scaling.summary import MEASURED, REPORT, BenchmarkDirectory
from paceline_lab.systems.compared import OURS, PLAIN, Comparison, TakenRun, step_time_s, summary, time_to
from paceline_lab.systems.proof import (
    Proof,
    Reference,
    References,
    as_compared,
    grown,
    must_be_cpus_of_this_machine,
    must_draw_nothing,
    normalises_apart,
)
from paceline_lab.systems.started import Finished, Kill, python_of, run
from paceline_lab.systems.system import JOB, SYSTEMS, Start, System, Task
from paceline_lab.systems.table import REFERENCE

PROOF_STEPS = 12  # steps of the first run of each system variant, in which losses are compared before any timing
STEPS = 70
_PATIENCE = 5.0
_PORTS = 40  # number of consecutive free ports that a run needs
# longest path of a Ray socket below the scratch folder; it contains the time and a process id
_LONGEST_SOCKET = "ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """One variant of a system, for example as documented or tuned.

    Attributes:
        key: identifier of the variant in the records of its runs.
        exact: True if the variant should compute the same losses as one process.
        global_batch: batch size of the variant; None if it is the comparison's batch size.
    """

    key: str
    system: System
    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    tuned: bool = False
    exact: bool = True
    threads: int = 1
    global_batch: int | None = None

    @property
    def title(self) -> str:
        """Title of the system and label of the variant, separated by a comma."""
        return f"{self.system.title}, {self.label}"


class Compare:
    """A comparison of systems, stored in a directory.

    Args:
        systems: names from `SYSTEMS`; paceline and one process of PyTorch are always included.
        plans: additional plans of paceline to measure beside the plan that `auto` chooses, e.g. with a sync rule that
            sends less data.
        repeat: number of runs of every system variant.
        steps: number of steps of every run.
        weak: whether every rank processes a batch of the job's global batch size; otherwise the ranks share one batch.
        tuned: whether to run each system a second time with paceline's memory and data settings and the system's own
            tuned settings.
        kill: whether to make one more run of each system in which a rank is killed half-way.
        deadline_s: seconds after which a run counts as hanging. The limit is raised to five times the run's estimated
            duration if that is longer.

    Raises:
        PacelineError: the job, a plan, a system's name or the directory is invalid.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster | None,
        systems: Sequence[str],
        *,
        plans: Sequence[str] = (),
        repeat: int = 5,
        steps: int | None = None,
        weak: bool = False,
        tuned: bool = True,
        kill: bool = False,
        deadline_s: float = 600.0,
        out: Path,
        say: Say,
        command: str = "paceline_lab.bench",
    ) -> None:
        self.cluster = cluster_to_run_on(cluster)
        must_be_cpus_of_this_machine(self.cluster)
        self.steps, self.repeat, self.deadline_s = steps or STEPS, repeat, deadline_s
        self.hosts = self.cluster.emulate.hosts if self.cluster.emulate else 1
        self.ranks = self.hosts if self.hosts > 1 else self.cluster.devices
        self.scaling: Scaling = "weak" if weak else "strong"
        self.base_batch = job.global_batch  # batch of the run that is the baseline of every speedup
        job = grown(job, self.ranks) if weak else job
        self.job, self.target = as_compared(job, self.steps, self.ranks), job.stop.loss_below
        must_draw_nothing(self.job)
        self.say, self.command, self.path, self.kill = say, command, out, kill
        self.pauses: dict[str, float | None] = {}  # pause after a kill in seconds; None if the training ended instead
        self.stopped_by: str | None = None
        self._emulation: Emulation | None = None
        self._is_stopped: Callable[[], bool] = lambda: False
        self.left_out: dict[str, str] = {}
        self.proofs: dict[str, Proof] = {}
        self.first_run_s: dict[str, float] = {}  # duration of the first run of each system, including its start
        loaded = {name: SYSTEMS[name].load() for name in dict.fromkeys([OURS, PLAIN, *systems])}
        self.directory = BenchmarkDirectory(out)
        self.plan = self._plan(job)
        self.ways = [way for system in loaded.values() for way in self._ways(system, plans, tuned=tuned)]
        self.pythons: dict[str, Path] = {}
        self.directory.begin(self._protocol())
        self.runs = self._measured()

    # Settings to measure

    def _plan(self, job: Job) -> Plan:
        """Return the plan that `auto` chooses; a resumed comparison keeps its original plan."""
        if begun := self.directory.begun_with():
            return begun[0]
        return choose(job.model_copy(update={"drop_last": True}), self.cluster, self.say, runs=self.repeat).plan

    def _ways(self, system: System, plans: Sequence[str], *, tuned: bool) -> Iterator[Way]:
        if reason := system.refuses(self.job, self.cluster):
            self.left_out[system.title] = reason
        elif system.name == OURS:
            yield Way(OURS, system, "--plan auto", {"plan": str(self.plan)})
            for number, text in enumerate(plans):
                plan = Plan.parse(text)
                refuse(self.job, plan, self.cluster)
                yield Way(f"{OURS}-{number + 1}", system, text, {"plan": text}, exact=not plan.inexact)
        elif system.name == PLAIN:
            own = self.base_batch if self.scaling == "weak" else None
            yield Way(PLAIN, system, f"one core, batch {own}" if own else "one core", global_batch=own)
            if self.cluster.devices > 1 and self.hosts == 1:
                yield Way(f"{PLAIN}-all", system, "all cores", threads=self.cluster.devices)
        else:
            yield Way(system.name, system, "as documented")
            if tuned and not system.apart:
                yield Way(f"{system.name}-tuned", system, "tuned", dict(system.tuned), tuned=True)

    def _protocol(self) -> dict[str, Any]:
        known = environment()
        ways = {way.key: {"label": way.label, "settings": way.settings} for way in self.ways}
        machine = {key: known[key] for key in ("host", "cpu", "cores", "torch", "paceline")}
        job = self.job.model_dump(mode="json")
        return {
            "plan": str(self.plan),
            "tried": [],
            "reason": "",
            "systems": ways,
            "steps": self.steps,
            "scaling": self.scaling,
            "job": job,
            "machine": machine,
        }

    def _measured(self) -> dict[str, list[TakenRun]]:
        found: dict[str, list[TakenRun]] = {way.key: [] for way in self.ways}
        file = self.path / MEASURED
        for line in file.read_text().splitlines() if file.exists() else []:
            taken = TakenRun(**json.loads(line))
            found.setdefault(taken.way, []).append(taken)
        return found

    # Runs

    def run(self) -> Comparison | None:
        """Compare losses, then perform the missing runs. Return None if nothing was measured."""
        self._install()
        with StopSignals() as signals, self._emulated() as self._emulation:
            self._is_stopped = lambda: signals.first is not None
            try:
                self._prove()
                for round_, way in rounds(self.ways, self.repeat):
                    done = {taken.round for taken in self.runs[way.key]}
                    if round_ not in done and way.title not in self.left_out:
                        self._measure(way, round_)
                for way in self.ways if self.kill else ():
                    if way.system.is_killed and way.system.name != PLAIN and not way.tuned and self.runs[way.key]:
                        self._kill(way)
            except KeyboardInterrupt:
                self.stopped_by = signals.first or "SIGINT"
        found = summary(self) if self.runs.get(OURS) else None
        if found is not None:
            write_whole(self.path / REPORT, json.dumps(asdict(found)))
        return found

    def _install(self) -> None:
        for system in {way.system.name: way.system for way in self.ways}.values():
            try:
                self.pythons[system.name] = python_of(system, self.say)
            except RunError as error:
                self._leave_out(system.title, error)
        self.ways = [way for way in self.ways if way.system.name in self.pythons]

    @contextmanager
    def _emulated(self) -> Iterator[Emulation | None]:
        """Emulate hosts for the other systems; the command of paceline emulates its own hosts."""
        if self.cluster.emulate is None:
            yield None
            return
        with Emulation(self.cluster.emulate) as emulation:
            yield emulation

    def _prove(self) -> None:
        """Compare the first losses of every system variant with the losses of one process."""
        steps = min(PROOF_STEPS, self.steps)
        references = References(lambda reference: self._losses(reference, steps))
        apart = normalises_apart(self.job)
        for way in self.ways:
            if way.title in self.left_out:
                continue
            began = time.monotonic()
            try:
                losses = self._one(way.system, self._task(way, steps), tuned=way.tuned).steps.losses
            except RunError as error:
                self._leave_out(way.title, error)
                continue
            self.first_run_s[way.system.name] = time.monotonic() - began
            proof = references.prove(losses, way.global_batch, self.parts(way) if apart else 1)
            self.proofs[way.key] = proof
            self.say(f"{way.title}: {proof}")

    def parts(self, way: Way) -> int:
        """Return the number of parts into which a system variant splits a batch."""
        if way.system.name == OURS:
            plan = Plan.parse(way.settings["plan"])
            return plan.data_ranks * plan.microbatches
        return 1 if way.system.name == PLAIN else self.ranks

    def _losses(self, reference: Reference, steps: int) -> list[float]:
        task = self._task(Way(REFERENCE.name, REFERENCE, "", global_batch=reference.batch), steps)
        task = replace(task, parts=reference.parts, disturbed=reference.disturbed)
        return self._one(REFERENCE, task, alone=True).steps.losses

    def _measure(self, way: Way, round_: int) -> None:
        before = _busiest(self._emulation)
        try:
            finished = self._one(way.system, self._task(way, self.steps), tuned=way.tuned)
        except RunError as error:
            self._leave_out(way.title, error)
            return
        ended = finished.steps.ended_s
        carried = _busiest(self._emulation) - before if self._emulation else 0.0
        carried = finished.steps.wire_bytes or carried
        taken = TakenRun(
            way.key,
            round_,
            step_time_s(ended),
            ended[0] - finished.began,
            finished.memory_bytes,
            carried / len(ended) if self._emulation else None,
            time_to(self.target, finished.steps.losses, ended),
            finished.steps.losses,
            [end - ended[0] for end in ended],
        )
        self.runs[way.key].append(taken)
        with open(self.path / MEASURED, "a") as lines:
            lines.write(json.dumps(asdict(taken)) + "\n")
        self.say(
            f"round {round_ + 1} of {self.repeat} · {way.system.title}, {way.label} · {seconds(taken.step_s)} a step · "
            f"first step after {taken.first_step_s:.1f} s"
        )

    def _kill(self, way: Way) -> None:
        """Perform one more run in which a rank is killed half-way."""
        kill, steps = Kill.within(self.runs[way.key])
        try:
            finished = self._one(way.system, self._task(way, steps), kill=kill)
        except RunError as error:
            if kill.time is None:
                self.say(f"{way.title}: not killed: {error}")
                return
            self.pauses[way.key] = None
            self.say(f"{way.title} ends when a rank is killed: {str(error).splitlines()[0]}")
            return
        if kill.time is None:
            self.say(f"{way.title}: not killed: it has no second rank, or ended before its time")
            return
        self.pauses[way.key] = kill.pause_s(finished.steps.ended_s)
        self.say(f"{way.title} goes on after {self.pauses[way.key]:.2f} s when a rank is killed")

    def _task(self, way: Way, steps: int) -> Task:
        channels_last = self.plan.memory_format == "channels_last" and way.tuned and way.system.takes_channels_last
        return Task(
            1 if way.system.name in (PLAIN, REFERENCE.name) else self.ranks,
            self.hosts,
            steps,
            way.threads,
            way.settings,
            way.tuned,
            channels_last,
            self.plan.num_workers if way.tuned else 0,
            global_batch=way.global_batch,
        )

    def _one(
        self, system: System, task: Task, *, tuned: bool = False, kill: Kill | None = None, alone: bool = False
    ) -> Finished:
        """Run a system once, in a folder that is kept if the run fails. `alone` disables emulated hosts."""
        hosts = self._emulation.hosts if self._emulation and not alone else ()
        folder = Path(tempfile.mkdtemp(prefix=f"{system.name}-", dir=self.path / "runs"))
        batch = task.global_batch or self.job.global_batch
        stop, evaluate = StopSpec(steps=task.steps), EvaluateSpec(every_steps=task.steps)
        changes = {"stop": stop, "evaluate": evaluate, "global_batch": batch}
        write_whole(folder / JOB, self.job.model_copy(update=changes).to_yaml())
        task.write(folder)
        python = self.pythons.get(system.name) or python_of(system, self.say)
        variables = dict(ALLOCATOR) if tuned else {}
        with scratch_folder(_LONGEST_SOCKET) as scratch:
            start = Start(system, python, folder, task, self.cluster, hosts, _free_port(), scratch)
            promised_s = self.first_run_s.get(system.name, 0.0) * task.steps / PROOF_STEPS
            deadline_s = max(self.deadline_s, _PATIENCE * promised_s)
            try:
                finished = run(start, variables, deadline_s=deadline_s, stopped=self._is_stopped, kill=kill)
            except KeyboardInterrupt:
                shutil.rmtree(folder)
                raise
        shutil.rmtree(folder)
        return finished

    def _leave_out(self, title: str, error: PacelineError) -> None:
        self.left_out[title] = str(error)
        self.say(f"{title} is left out: {error}")


def _busiest(emulation: Emulation | None) -> float:
    if emulation is None:
        return 0.0
    return float(max(max(link.sent_bytes, link.received_bytes) for link in emulation.carried().values()))


def _free_port() -> int:
    """Find the first of several consecutive unused ports."""
    for _ in range(100):
        with ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for number in range(1, _PORTS):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port + number))
            except (OSError, OverflowError):
                continue
            return port
    raise RunError("compare.no_ports", "no {ports} consecutive free ports were found on loopback", ports=_PORTS)
