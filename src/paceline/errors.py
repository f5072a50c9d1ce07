"""Errors for users: each text names the problem, its position and a solution."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from paceline.planning.plan import Plan

_failure_callbacks: list[Callable[[BaseException], None]] = []  # at most one


def on_failure(tell: Callable[[BaseException], None]) -> None:
    """Register `tell` as the only callback for the error that ends a rank.

    `tell` is called before the rank releases any resource.
    """
    _failure_callbacks[:] = [tell]


def report_failure(error: BaseException) -> None:
    """Call the registered callback with the error that ends this rank."""
    for tell in _failure_callbacks:
        tell(error)


class Problem:
    """Description of one problem: a code for programs and a text for people.

    The text shows a list as `a, b, c`, or with `{name!s}` in Python's notation. Making a problem never fails: if a
    field is missing or cannot be formatted, the text is the template followed by the fields.

    Args:
        code: area and condition, such as `plan.heads_not_divisible`. A code never changes between versions.
        template: the text with `{name}` for each field. It must be a literal of the program, never outside input.
        fields: values for the text. Numbers, text, and lists and mappings of these are kept; other values become text.
    """

    def __init__(self, code: str, template: str, /, **fields: object) -> None:
        given = {name: list(value) if isinstance(value, Iterator) else value for name, value in fields.items()}
        self.code, self.template = code, template
        self.fields: dict[str, Any] = {name: _plain(value) for name, value in given.items()}
        try:
            self.text = template.format(**{name: _shown(value) for name, value in given.items()})
        except Exception:  # noqa: BLE001 - the error itself must not be lost
            self.text = f"{template} {self.fields}"

    def at(self, place: str) -> Self:
        """Return a copy with `place` in front of the text and as an additional field."""
        located = copy.copy(self)
        located.text, located.fields = f"{place}: {self.text}", {"place": place, **self.fields}
        return located

    @classmethod
    def of_parts(cls, code: str, template: str, fields: Mapping[str, object]) -> Self:
        """Restore a problem that another process of this program described."""
        return cls(code, template, **fields)

    def replaced(self, **fields: object) -> Self:
        """Return a copy with new values for some fields."""
        return type(self)(self.code, self.template, **(self.fields | fields))

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    def __repr__(self) -> str:
        """Return the class, the code and the text."""
        return f"{type(self).__name__}({self.code}: {self.text})"

    def __eq__(self, other: object) -> bool:
        """Compare the class, the code and the text."""
        return type(self) is type(other) and isinstance(other, Problem) and self._key() == other._key()

    def __hash__(self) -> int:
        """Hash the values that `==` compares."""
        return hash(self._key())

    def _key(self) -> tuple[str, str]:
        return self.code, self.text


class PlanProblem(Problem):
    """A reason why a plan cannot run a job on a cluster.

    Attributes:
        code: identifier of the reason, such as `plan.heads_not_divisible`; it does not change between versions.
        fields: values in the text, by name; all are JSON values.
        text: a sentence for people, with the value that would work.
        template: the text with `{name}` for each field.
    """

    def __init__(self, code: str, template: str, /, **fields: object) -> None:
        super().__init__(code, template, **(({"plan": "…"} if "{plan}" in template else {}) | fields))

    def about(self, plan: object) -> PlanProblem:
        """Return the same problem with another plan as its subject."""
        return self.replaced(plan=plan)

    @property
    def predicate(self) -> str:
        """The text without its subject, the plan."""
        return self.text.removeprefix(f"plan {self.fields['plan']} ")


class _Listed(list[Any]):
    """List that a template formats as `a, b, c`."""

    def __format__(self, spec: str) -> str:
        """Join the items with commas, each in the given format."""
        return ", ".join(format(item, spec) for item in self)


def _shown(value: object) -> object:
    return _Listed(value) if isinstance(value, list) else value


def _plain(value: object) -> Any:
    """Convert a value to a form that JSON supports."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value) if isfinite(value) else str(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - of any class, also one of a user
        return f"<{type(value).__name__}>"


class PacelineError(Exception):
    """Base class of all errors that paceline raises on purpose, with texts for users.

    `PlanError("plan.devices", "{plan} needs {needed} devices; there are {found}.", plan=plan, needed=8, found=4)`

    Attributes:
        problems: all problems, at least one. `code`, `template` and `fields` belong to the first problem.
        from_users_code: True if the user's own code raised the original exception. Commands then name a file with the
            exception's traceback, or print the traceback.
        may_pass: True if a second attempt may succeed, so a restart is worthwhile.
        exit_code: exit code of a command that ends with this error. It is 130 or 143 if SIGINT or SIGTERM arrived
            before the run had a state to save.
        traceback: the part of the text that is the traceback of a rank's error. Commands print this part only with
            `--traceback`, or if they cannot write it to a file.
    """

    from_users_code = False
    may_pass = False
    exit_code = 1
    traceback = ""
    keywords: ClassVar[tuple[str, ...]] = ("from_users_code", "may_pass", "exit_code", "traceback")
    problems: tuple[Problem, ...]

    def __init__(self, code: str, template: str, /, **fields: object) -> None:
        """Make an error.

        Args:
            code: see `Problem`.
            template: see `Problem`.
            fields: values for the text, and attributes of the error that the class lists in `keywords`.
        """
        own = {name: fields[name] for name in fields if name in self.keywords}
        shown = {name: value for name, value in fields.items() if name not in own or f"{{{name}" in template}
        problem = Problem(code, template, **shown)
        super().__init__(problem.text)
        self.problems = (problem,)
        self.__dict__.update(own)

    @classmethod
    def of_problems(cls, problems: Sequence[Problem], **attributes: object) -> Self:
        """Combine problems into one error, whose text has one line per problem."""
        error = cls.__new__(cls, "\n".join(problem.text for problem in problems))
        error.__dict__.update(attributes, problems=tuple(problems))
        return error

    @classmethod
    def of_error(cls, error: PacelineError | InvalidValue, place: object = "", **attributes: object) -> Self:
        """Make an error of this class with the codes and fields of another error.

        Args:
            error: the other error.
            place: position of the problem, which is put in front of the text.
            attributes: attributes of the new error.
        """
        own = cls.__new__(cls, f"{place}: {error}" if place else str(error))
        kept = {name: value for name, value in vars(error).items() if name in cls.keywords}
        own.__dict__.update(kept | attributes, problems=error.problems)
        return own

    def as_json(self) -> dict[str, Any]:
        """Return the description of this error for another process or a file."""
        return {"code": self.code, "text": str(self), "fields": self.fields}

    @classmethod
    def of_json(cls, told: Mapping[str, Any], **attributes: object) -> Self:
        """Restore an error, including its code, from the description that `as_json` made."""
        code, text = str(told.get("code", "")), str(told.get("text", ""))
        problem = Problem(code if _CODE.fullmatch(code) else "error.received", "{text}", text=text)
        problem.fields = _plain(told.get("fields") or {})
        return cls.of_problems([problem], **attributes)

    @property
    def code(self) -> str:
        """Code of the first problem."""
        return self.problems[0].code

    @property
    def template(self) -> str:
        """Template of the first problem."""
        return self.problems[0].template

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the first problem."""
        return self.problems[0].fields

    def __repr__(self) -> str:
        """Return the class, the code and the text."""
        return f"{type(self).__name__}({self.code}: {self})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle or copy the error with its text and all attributes."""
        return _made_again, (type(self), str(self)), self.__dict__


class InvalidValue(ValueError):
    """Invalid value that a validator found in a job, a cluster or another file.

    `paceline.yaml_file.explain` adds the position of the value. The arguments are the same as for `Problem`.
    """

    def __init__(self, code: str, template: str, /, **fields: object) -> None:
        problem = Problem(code, template, **fields)
        super().__init__(problem.text)
        self.problems: tuple[Problem, ...] = (problem,)

    @classmethod
    def of_error(cls, error: PacelineError) -> Self:
        """Convert an error that another function raised."""
        invalid = cls.__new__(cls, str(error))
        invalid.problems = error.problems[:1]
        return invalid


_CODE = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


def _made_again(kind: type[PacelineError], text: str) -> PacelineError:
    return kind.__new__(kind, text)


class JobError(PacelineError):
    """The job (model, data, loss, optimizer, stop rule) is invalid or cannot be built."""


class DataError(JobError):
    """The data is missing, empty, malformed, out of range, or changed while it was used."""


class BatchError(DataError):
    """The model cannot compute a batch, whatever the plan."""


class LoaderProcessError(DataError):
    """A DataLoader worker process was killed, ended or did not answer in time."""

    may_pass = True


class ClusterError(PacelineError):
    """The requested machines do not exist or cannot be used."""


class PlanError(PacelineError):
    """A plan cannot be read, or cannot run this job on this cluster. The text lists every reason.

    Attributes:
        problems: every reason.
        nearest: the working plan that differs least; None if no such plan was found or searched for.
    """

    nearest: Plan | None = None
    keywords = (*PacelineError.keywords, "nearest")

    @classmethod
    def of_problems(cls, problems: Sequence[Problem], **attributes: object) -> Self:
        """Combine problems into one error, one per line, followed by the nearest plan."""
        error = super().of_problems(problems, **attributes)
        if error.nearest is not None:
            error.args = (f"{error}\n{proposal(error.nearest)}",)
        return error


def proposal(nearest: object) -> PlanProblem:
    """Return the last line of a `PlanError`, which proposes a plan that works."""
    return PlanProblem("plan.nearest", "Nearest plan that works: {plan}.", plan=nearest)


class NonFiniteError(PacelineError):
    """NaN, Inf or spikes in the data, loss or gradients ended the training.

    The policy is to stop, or skipping updates or rewinding did not help.
    """


class CheckpointError(PacelineError):
    """A checkpoint cannot be written or read, or no complete checkpoint exists."""


class RunError(PacelineError):
    """The run directory cannot be used, or does not contain the requested data."""


class StorageError(PacelineError):
    """An object store cannot be used, or does not contain the requested object.

    Attributes:
        absent: True if the object does not exist.
        exists: True if the object already exists.
        denied: True if the credentials are missing or insufficient.
    """

    absent = False
    exists = False
    denied = False
    keywords = (*PacelineError.keywords, "absent", "exists", "denied")


class LaunchError(PacelineError):
    """The ranks could not be started, or one of them raised, hung or was killed.

    Attributes:
        rank: the rank that failed first; 0 if no rank failed.
        final: True if a restart would fail in the same way.
        rank_error: class name of the exception that the rank raised; None without an exception.
        explained: True if the rank's exception was a PacelineError.
        out_of_memory: True if the host's kernel killed the rank for lack of memory.
    """

    rank: int = 0
    final = False
    rank_error: str | None = None
    explained = False
    out_of_memory = False
    keywords = (*PacelineError.keywords, "rank", "final", "rank_error", "explained", "out_of_memory")


class ChannelError(PacelineError):
    """A connection between processes of a run failed, or carried invalid data."""

    may_pass = True


class DeadlineError(ChannelError):
    """A peer did not answer in time; the message names the peer or its task."""


class RemoteError(PacelineError):
    """A remote function raised or cannot be called, or a value cannot be sent.

    Attributes:
        function: name of the function on the remote side.
        kind: class name of the remote exception; empty if the function was not called.
        remote_traceback: the remote traceback as text, safe to print.
    """

    function = ""
    kind = ""
    remote_traceback = ""
    keywords = (*PacelineError.keywords, "function", "kind", "remote_traceback")


class SyncError(PacelineError):
    """Ranks failed to communicate in time; the message names the missing ranks."""


_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo/",
    "connectFullMesh",
    "Timed out waiting",
    "Socket Timeout",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
)


def lost_a_peer(error: BaseException) -> bool:
    """Return True if a lost connection or a missing rank caused an error.

    Any other error has its cause in this rank. For most lost connections, torch raises a `DistError`, which is
    recognized by its class name. gloo raises plain RuntimeErrors.
    """
    if isinstance(error, SyncError) or any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError | ConnectionError) and any(text in str(error) for text in _LOST_PEER)


# Texts of CUDA, ROCm and NVML errors, by what has failed. Other errors of a device are errors of a kernel.
_DEVICE_FAULTS = {
    "lost": ("fallen off the bus", "device is lost", "GPU is lost", "no CUDA-capable device", "busy or unavailable"),
    "memory": ("uncorrectable ECC", "uncorrectable NVLink", "hardware stack error", "hardware error"),
}
_XIDS = "the driver reports XID "
# XIDs (error numbers of NVIDIA's driver) of failed hardware, by what has failed (docs.nvidia.com/deploy/xid-errors).
# Most other XIDs are errors of programs.
HARDWARE_XIDS = {"lost": {62, 79, 119, 120, 143}, "memory": {48, 64, 74, 94, 95, 140}}


def device_fault(error: BaseException) -> str | None:
    """Classify a failure of an accelerator that its driver reports; None for any other error.

    `lost` means that the device no longer answers, `memory` that its memory or a link has an uncorrectable error. Both
    are failures of hardware. `kernel` means that a kernel has failed, for example by an illegal memory access; every
    later call of this process on the device fails as well.
    """
    if not any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):
        return None
    text, xids = str(error), xids_of(error)
    for fault, texts in _DEVICE_FAULTS.items():
        if xids & HARDWARE_XIDS[fault] or any(part in text for part in texts):
            return fault
    return "kernel"


def note_xids(error: BaseException, xids: Collection[int]) -> None:
    """Add the driver's XIDs to an error of a device, as a note."""
    if xids:
        error.add_note(f"{_XIDS}{', '.join(map(str, sorted(set(xids))))}")


def xids_of(error: BaseException) -> set[int]:
    """Return the XIDs that were added to an error."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_XIDS)]
    return {int(number) for note in notes for number in note.removeprefix(_XIDS).split(", ")}


class ServerRefused(PacelineError):
    """A parameter server refused a request.

    The request changed nothing. The message explains what to do.
    """


class ServerLost(ChannelError):
    """No process of a parameter server answers, neither primary nor backup."""


class FederateError(PacelineError):
    """A server and its clients are incompatible."""
