"""Errors a user sees: each says what was wrong, where, and what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from paceline.planning.plan import Plan

_to_be_told: list[Callable[[BaseException], None]] = []  # one at most


def on_failure(tell: Callable[[BaseException], None]) -> None:
    """Register `tell` for the error that ends a rank, in the place of any other.

    It is called before the rank lets go of anything.
    """
    _to_be_told[:] = [tell]


def tell_of_failure(error: BaseException) -> None:
    """Tell who wants to know of the error that ends this rank."""
    for tell in _to_be_told:
        tell(error)


class Problem:
    """A code for programs and a text for people, of one thing that is wrong.

    A list is shown as `a, b, c`, and with `{name!s}` as Python shows it. Making a problem never fails: if a field is
    missing, or cannot be shown as the template asks, the text is the template followed by the fields.

    Args:
        code: area and condition, such as `plan.heads_not_divisible`. It never changes.
        template: the text with `{name}` in the place of each field. Never text from outside of the program.
        fields: values of the text. Numbers, text, lists and mappings of such are kept; anything else becomes text.
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
        """Return this problem with a place before its text, and as the field `place`."""
        located = copy.copy(self)
        located.text, located.fields = f"{place}: {self.text}", {"place": place, **self.fields}
        return located

    @classmethod
    def of_parts(cls, code: str, template: str, fields: Mapping[str, object]) -> Self:
        """Make a problem again that another process of this program described."""
        return cls(code, template, **fields)

    def replaced(self, **fields: object) -> Self:
        """Return this problem with other values of some fields."""
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
        """Hash what `==` compares."""
        return hash(self._key())

    def _key(self) -> tuple[str, str]:
        return self.code, self.text


class PlanProblem(Problem):
    """A reason why a plan cannot run a job on a cluster.

    Attributes:
        code: identifier of the reason, such as `plan.heads_not_divisible`; it does not change between versions.
        fields: the values that the text is made of, by name; all are JSON values.
        text: a sentence for people, with the value that would work.
        template: the text with `{name}` in the place of each field.
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
    """A list that a template shows as `a, b, c`."""

    def __format__(self, spec: str) -> str:
        """Return the items, each in the given format, with commas."""
        return ", ".join(format(item, spec) for item in self)


def _shown(value: object) -> object:
    return _Listed(value) if isinstance(value, list) else value


def _plain(value: object) -> Any:
    """Return a value as JSON can hold it."""
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
    """Base of every error that paceline raises on purpose. The text is written for the person at the keyboard.

    `PlanError("plan.devices", "{plan} needs {needed} devices; there are {found}.", plan=plan, needed=8, found=4)`

    Attributes:
        problems: everything that is wrong, one at least. `code`, `template` and `fields` are those of the first.
        from_users_code: the cause was raised by the user's own code, so its traceback belongs under the text.
        may_pass: a second attempt may succeed, so a restart is worth its time.
        exit_code: exit code of a command that ends with this error. It is 130 or 143 if SIGINT or SIGTERM came before
            there was anything to save.
        traceback: the part of the text that is the traceback of a rank's error. Commands keep it off the screen.
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
            code: as of a `Problem`.
            template: as of a `Problem`.
            fields: values of the text; and attributes of the error, which are in `keywords` of its class.
        """
        own = {name: fields[name] for name in fields if name in self.keywords}
        shown = {name: value for name, value in fields.items() if name not in own or f"{{{name}" in template}
        problem = Problem(code, template, **shown)
        super().__init__(problem.text)
        self.problems = (problem,)
        self.__dict__.update(own)

    @classmethod
    def of_problems(cls, problems: Sequence[Problem], **attributes: object) -> Self:
        """Make one error of all problems, one on each line of its text."""
        error = cls.__new__(cls, "\n".join(problem.text for problem in problems))
        error.__dict__.update(attributes, problems=tuple(problems))
        return error

    @classmethod
    def of_error(cls, error: PacelineError | InvalidValue, place: object = "", **attributes: object) -> Self:
        """Make an error of this class with the codes and fields of another.

        Args:
            error: the other error.
            place: where it happened, for the beginning of the text.
            attributes: attributes of the new error.
        """
        own = cls.__new__(cls, f"{place}: {error}" if place else str(error))
        kept = {name: value for name, value in vars(error).items() if name in cls.keywords}
        own.__dict__.update(kept | attributes, problems=error.problems)
        return own

    def as_json(self) -> dict[str, Any]:
        """Return what another process or a file needs to know of this error."""
        return {"code": self.code, "text": str(self), "fields": self.fields}

    @classmethod
    def of_json(cls, told: Mapping[str, Any], **attributes: object) -> Self:
        """Make an error again that another process described by `as_json`; its code stays."""
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
        """Pickle and copy the text with everything else."""
        return _made_again, (type(self), str(self)), self.__dict__


class InvalidValue(ValueError):
    """A wrong value, raised by a validator of a job, a cluster or another file.

    `paceline.yaml_file.explain` adds its place. Arguments are those of a `Problem`.
    """

    def __init__(self, code: str, template: str, /, **fields: object) -> None:
        problem = Problem(code, template, **fields)
        super().__init__(problem.text)
        self.problems: tuple[Problem, ...] = (problem,)

    @classmethod
    def of_error(cls, error: PacelineError) -> Self:
        """Make it of an error that another function raised."""
        invalid = cls.__new__(cls, str(error))
        invalid.problems = error.problems[:1]
        return invalid


_CODE = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


def _made_again(kind: type[PacelineError], text: str) -> PacelineError:
    return kind.__new__(kind, text)


class JobError(PacelineError):
    """The job (model, data, loss, optimizer, stop rule) is wrong or cannot be built."""


class DataError(JobError):
    """The data is missing, empty, malformed, out of range, or changed while it was used."""


class BatchError(DataError):
    """The model cannot compute a batch, whatever the plan."""


class LoaderProcessError(DataError):
    """A DataLoader worker process was killed, ended or did not answer in time."""

    may_pass = True


class ClusterError(PacelineError):
    """The machines asked for are not the machines there are."""


class PlanError(PacelineError):
    """A plan cannot be read, or cannot run this job on this cluster. The text lists every reason.

    Attributes:
        problems: every reason.
        nearest: the plan that works and differs least; None if none was found or searched for.
    """

    nearest: Plan | None = None
    keywords = (*PacelineError.keywords, "nearest")

    @classmethod
    def of_problems(cls, problems: Sequence[Problem], **attributes: object) -> Self:
        """Make one error of all problems, a line each, and the nearest plan."""
        error = super().of_problems(problems, **attributes)
        if error.nearest is not None:
            error.args = (f"{error}\n{proposal(error.nearest)}",)
        return error


def proposal(nearest: object) -> PlanProblem:
    """Return the last line of a refusal: the plan that works."""
    return PlanProblem("plan.nearest", "Nearest plan that works: {plan}.", plan=nearest)


class NonFiniteError(PacelineError):
    """NaN or Inf in the data, loss or gradients, with the policy to stop."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be written or read, or none that is whole exists."""


class RunError(PacelineError):
    """The run directory cannot be used, or does not hold what was asked of it."""


class StorageError(PacelineError):
    """An object store cannot be used, or does not hold what was asked of it.

    Attributes:
        absent: there is no such object.
        exists: there is one, where a new one was to be made.
        denied: no credentials, or without the right.
    """

    absent = False
    exists = False
    denied = False
    keywords = (*PacelineError.keywords, "absent", "exists", "denied")


class LaunchError(PacelineError):
    """The ranks could not be started, or one of them raised, hung or was killed.

    Attributes:
        rank: the rank that failed first, if one did.
        final: a restart would fail in the same way.
        rank_error: class name of the exception that the rank raised, if it raised one.
        explained: that exception was a PacelineError.
    """

    rank: int = 0
    final = False
    rank_error: str | None = None
    explained = False
    keywords = (*PacelineError.keywords, "rank", "final", "rank_error", "explained")


class ChannelError(PacelineError):
    """A connection between processes of a run failed, or carried what no peer sends."""

    may_pass = True


class DeadlineError(ChannelError):
    """A peer did not answer in time. The message names it, or what it was to do."""


class RemoteError(PacelineError):
    """A remote function raised, cannot be called, or was given or returned unsendable values.

    Attributes:
        function: its name there.
        kind: name of the class of what it raised; empty where it was not called.
        remote_traceback: as text, made safe to show.
    """

    function = ""
    kind = ""
    remote_traceback = ""
    keywords = (*PacelineError.keywords, "function", "kind", "remote_traceback")


class SyncError(PacelineError):
    """Ranks failed to agree in time. The message names the ranks that are missing."""


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
    """True if the cause of an error is a lost connection or a missing rank.

    Any other error is this rank's own. torch raises a `DistError` for most lost connections, recognized here by its
    name. gloo raises plain RuntimeErrors.
    """
    if isinstance(error, SyncError) or any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError | ConnectionError) and any(text in str(error) for text in _LOST_PEER)


class ServerRefused(PacelineError):
    """A parameter server refused what it was asked. Nothing was changed; the message says what to do."""


class ServerLost(ChannelError):
    """No process of a parameter server answers, neither the primary nor its backup."""


class FederateError(PacelineError):
    """A server and its clients do not go together."""
