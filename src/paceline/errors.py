"""Errors a user sees: each says what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Self

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

    A field that is a list is shown as `a, b, c`. Making a problem never fails: if a field is missing, or cannot be
    shown as the template asks, the text is the template followed by the fields.

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
        return PlanProblem(self.code, self.template, **(self.fields | {"plan": plan}))

    @property
    def predicate(self) -> str:
        """The text without its subject, the plan."""
        return self.text.removeprefix(f"plan {self.fields['plan']} ")


def _shown(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


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
    """Base of every error that paceline raises on purpose. The message is written for the person at the keyboard.

    Attributes:
        from_users_code: it was raised from an error in the user's own code, so that one's traceback belongs under the
            message.
        may_pass: the same may well work when it is tried again, so a restart is worth its time.
        exit_code: of a command that ends with it; 130 and 143 where SIGINT or SIGTERM came before there was anything
            to save.
        traceback: the part of the message that is the traceback of a rank's error; commands keep it off the screen.
    """

    traceback = ""
    from_users_code = False
    may_pass = False
    exit_code = 1


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

    problems: tuple[Problem, ...] = ()
    nearest: Plan | None = None

    @classmethod
    def of_problems(cls, problems: Sequence[Problem], **attributes: object) -> Self:
        """Make one error of all problems, a line each, and the nearest plan."""
        error = cls("\n".join(problem.text for problem in problems))
        error.problems = tuple(problems)
        error.__dict__.update(attributes)
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

    def __init__(
        self, text: str, *, absent: bool = False, exists: bool = False, denied: bool = False, may_pass: bool = False
    ) -> None:
        super().__init__(text)
        self.absent, self.exists, self.denied, self.may_pass = absent, exists, denied, may_pass


class LaunchError(PacelineError):
    """The ranks could not be started, or one of them raised, hung or was killed.

    Attributes:
        rank: the rank that failed first, if one did.
        final: a restart would fail in the same way.
        rank_error: class name of the exception that the rank raised, if it raised one.
        explained: that exception was a PacelineError.
    """

    def __init__(
        self,
        text: str,
        rank: int = 0,
        *,
        final: bool = False,
        rank_error: str | None = None,
        explained: bool = False,
        exit_code: int = 1,
        traceback: str = "",
    ) -> None:
        super().__init__(text)
        self.rank, self.final, self.rank_error, self.explained = rank, final, rank_error, explained
        self.exit_code, self.traceback = exit_code, traceback


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

    def __init__(self, text: str, *, function: str = "", kind: str = "", remote_traceback: str = "") -> None:
        super().__init__(text)
        self.function, self.kind, self.remote_traceback = function, kind, remote_traceback


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
