"""Descriptions of sync rules, codecs and transports: the values of `sync=`, `compress=` and `transport=`.

Importing this module imports no rule and no transport.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from paceline.errors import ClusterError, PlanError
from paceline.extensions import ExtensionPoint
from paceline.text import nearest


@dataclass(frozen=True)
class Argument:
    """One argument that a rule or codec takes.

    Attributes:
        convert: function that converts text to a value, and raises ValueError for invalid text.
        default: default value; None if the argument is required.
        what: description of valid values for error texts, such as "a whole number, at least 1".
    """

    convert: Callable[[str], Any]
    default: Any
    what: str


def whole(least: int) -> Callable[[str], int]:
    """Return a function that converts text to an integer of at least `least`."""

    def convert(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise ValueError
        return int(text)

    return convert


def between(least: float, most: float, *, open_below: bool = False) -> Callable[[str], float]:
    """Return a function that converts text to a number from `least` to `most`.

    With `open_below`, `least` itself is invalid.
    """

    def convert(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (open_below and value == least):
            raise ValueError
        return value

    return convert


def whole_or_inf(text: str) -> float:
    """Convert text to an integer of at least 0, or `inf` to infinity."""
    return math.inf if text == "inf" else float(whole(0)(text))


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    """Return a function that accepts only the given words."""

    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return convert


def pieces(key: str, text: str) -> tuple[str, dict[str, str]]:
    """Split the text of a rule or codec into its name and arguments.

    A value after the colon without a key has the key "".

    Raises:
        PlanError: an option has no key or value, or a key is given twice.
    """
    head, *options = text.split(",")
    name, colon, value = head.partition(":")
    given: dict[str, str] = {}
    if colon and "=" in value:
        options = [value, *options]
    elif colon:
        given[""] = value
    for option in options:
        word, equals, setting = option.partition("=")
        if not equals or not word or word in given:
            raise PlanError(
                "plan.option_malformed",
                '{key}={text}: "{option}" is not a valid option. Write {name}:VALUE,KEY=VALUE, and each key only once.',
                key=key,
                text=text,
                option=option,
                name=name,
            )
        given[word] = setting
    return name, given


def converted(where: str, name: str, takes: Mapping[str, Argument], given: Mapping[str, str]) -> dict[str, Any]:
    """Convert all arguments in `takes` from their text, or use their defaults.

    Args:
        where: plan text for errors, such as `sync=local:8`.

    Raises:
        PlanError: `name` does not accept one of the arguments, or a value is invalid.
    """
    for word in given:
        if word not in takes:
            if word and len(takes) > 1:
                raise PlanError(
                    "plan.rule_setting_unknown",
                    '{where}: "{word}" is not a valid setting. {hint}',
                    where=where,
                    word=word,
                    hint=nearest(word, [w for w in takes if w]),
                )
            unknown = word or f"'{given[word]}'"
            keys = ", ".join(f"{key}=" for key in takes if key)
            raise PlanError(
                "plan.rule_takes_none",
                "{where}: {name} does not accept {unknown}{keys}",
                where=where,
                name=name,
                unknown=unknown,
                keys=f"; it takes {keys}" if keys else "",
            )
    values: dict[str, Any] = {}
    for word, argument in takes.items():
        if word not in given:
            if argument.default is None:
                raise PlanError(
                    "plan.rule_needs",
                    "{where}: {name} needs {what}, e.g. {where}:8",
                    where=where,
                    name=name,
                    what=argument.what,
                )
            values[word] = argument.default
            continue
        try:
            values[word] = argument.convert(given[word])
        except ValueError:
            raise PlanError(
                "plan.rule_value_invalid",
                '{where}: {word} must be {what}, not "{given}"',
                where=where,
                word=word or name,
                what=argument.what,
                given=given[word],
            ) from None
    return values


@dataclass(frozen=True)
class CodecInfo:
    """Description of a codec, readable without torch.

    Attributes:
        codec: import path of its constructor: a class or function that takes a `paceline.sync.compress.Coding`.
        sent_bytes: function that returns the predicted bytes sent per element of a tensor, given a `Sending`.
        arguments: maps the names of arguments to descriptions; the value after the colon has the name "".
        codes_numbers: True if the codec encodes each element separately. Such a codec may follow one that selects
            elements, as in `topk:0.01+bf16`.
        keeps_numbers: True if the codec selects elements that a second codec may encode.
        of_sums: True if the codec encodes sums over ranks instead of the elements of one rank.
        tried_by_auto: text of the codec that `compress=auto` tries; None if `auto` does not try the codec.
        order: position in the order in which `auto` tries codecs; codecs with smaller values lose less information.
    """

    codec: str
    sent_bytes: Callable[[Sending], float]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    codes_numbers: bool = False
    keeps_numbers: bool = False
    of_sums: bool = False
    tried_by_auto: str | None = None
    order: int = 0


@dataclass(frozen=True)
class Sending:
    """Elements that a codec will send, for the prediction of their bytes.

    Attributes:
        value: value after the colon, such as the fraction of elements to keep; None if the codec takes no value.
        number_bytes: bytes per kept element, after a second codec if there is one.
        plain_bytes: bytes per element without a codec.
        matrices: rows, columns and number of the model's weight matrices.
    """

    value: Any
    number_bytes: float
    plain_bytes: float
    matrices: Sequence[tuple[float, float, float]] = ()


def _topk_bytes(sending: Sending) -> float:
    """Return the bytes per element of a sparse tensor with 4-byte indices."""
    return float(sending.value) * (sending.number_bytes + 4)


def _powersgd_bytes(sending: Sending) -> float:
    """Return the bytes of two thin factors per element of a matrix."""
    whole_size = sum(rows * columns * times for rows, columns, times in sending.matrices)
    thin = sum(sending.value * (rows + columns) * times for rows, columns, times in sending.matrices)
    return sending.number_bytes * min(1.0, thin / whole_size) if whole_size else sending.plain_bytes


def _share(text: str) -> float:
    return between(0, 1, open_below=True)(text)


_MODULES = "paceline.sync.compress"
_SHARE = Argument(_share, 0.01, "the fraction of values that is kept, above 0 and at most 1")
_RANK = Argument(whole(1), 4, "the rank of the factors, a whole number, at least 1")
# Scales take less than a hundredth of the sent bytes, and are left out of the prediction.
CODECS = ExtensionPoint(
    "codec",
    "paceline.codecs",
    CodecInfo,
    {
        "fp16": CodecInfo(f"{_MODULES}.codecs:fp16", lambda _: 2.0, codes_numbers=True),
        "bf16": CodecInfo(f"{_MODULES}.codecs:bf16", lambda _: 2.0, codes_numbers=True, tried_by_auto="bf16"),
        "int8": CodecInfo(f"{_MODULES}.codecs:int8", lambda _: 1.0, codes_numbers=True, tried_by_auto="int8", order=1),
        "int4": CodecInfo(f"{_MODULES}.codecs:int4", lambda _: 0.5, codes_numbers=True),
        "1bit": CodecInfo(f"{_MODULES}.codecs:one_bit", lambda _: 0.125),
        "topk": CodecInfo(f"{_MODULES}.codecs:topk", _topk_bytes, {"": _SHARE}, keeps_numbers=True),
        "powersgd": CodecInfo(
            f"{_MODULES}.powersgd:powersgd",
            _powersgd_bytes,
            {"": _RANK},
            keeps_numbers=True,
            of_sums=True,
            # a GPT lost 5 % with powersgd:4, and 1 % with 16
            tried_by_auto="powersgd:16+int8",
            order=2,
        ),
    },
    PlanError,
    words=("none", "auto"),
)


@dataclass(frozen=True)
class CompressSpec:
    """Parsed value of `compress=`, such as `int8` or `topk:0.01+bf16`.

    The form is `CODEC[:VALUE][+CODEC]`. The second codec encodes the elements that the first codec keeps.

    Attributes:
        codecs: name and value of each codec.
    """

    codecs: tuple[tuple[str, Any], ...]

    @classmethod
    def parse(cls, text: str) -> CompressSpec:
        """Parse the value of `compress=`, except `none` and `auto`.

        Raises:
            PlanError: a codec is unknown, a value is invalid, or two codecs cannot be combined.
        """
        found: list[tuple[str, Any]] = []
        infos: list[CodecInfo] = []
        for word in text.split("+"):
            name, given = pieces("compress", word)
            try:
                infos.append(CODECS[name])
            except PlanError as error:
                raise PlanError("plan.compress_refused", "compress={text}: {error}", text=text, error=error) from None
            found.append((name, converted(f"compress={text}", name, infos[-1].arguments, given).get("")))
        first, *others = infos
        if len(others) > 1 or (others and not (first.keeps_numbers and others[0].codes_numbers)):
            raise PlanError(
                "plan.codec_not_combinable",
                "compress={text}: {codecs} may be followed only by one of {numbers}, which encodes the remaining "
                "numbers, e.g. compress=topk:0.01+bf16. Other codecs cannot be combined.",
                text=text,
                codecs=" or ".join(_those("keeps_numbers")),
                numbers=list(_those("codes_numbers")),
            )
        return cls(tuple(found))

    @property
    def first(self) -> CodecInfo:
        """Description of the first codec, which selects the elements if there are two."""
        return CODECS[self.codecs[0][0]]

    def sent_bytes(self, plain_bytes: float, matrices: Sequence[tuple[float, float, float]]) -> float:
        """Predict the bytes sent per gradient element of `plain_bytes` bytes."""
        kept = plain_bytes
        for name, value in reversed(self.codecs):
            kept = CODECS[name].sent_bytes(Sending(value, kept, plain_bytes, matrices))
        return kept


def auto_candidates() -> tuple[tuple[str, ...], list[str]]:
    """Return the codecs that `compress=auto` tries, the least lossy first.

    Codecs of packages that cannot be loaded are left out. The second value contains their error texts.
    """
    known, errors = CODECS.loadable()
    tried = sorted((info for info in known.values() if info.tried_by_auto), key=lambda info: info.order)
    return tuple(str(info.tried_by_auto) for info in tried), errors


def _those(ability: str) -> list[str]:
    return [name for name, info in CODECS.built_in.items() if getattr(info, ability)]


# algorithms of an all-reduce, see `paceline.comm.allreduce`; `auto` chooses one of them
ALGORITHMS = ("flat", "ring", "hierarchical")


class ServerProcesses(NamedTuple):
    """Numbers of parameter servers and of their processes.

    Attributes:
        parts: number of servers, each of which holds a part of the parameters.
        each: number of processes per part; 2 if each server has a backup.
    """

    parts: int
    each: int

    @classmethod
    def of(cls, sync: str) -> ServerProcesses:
        """Return the servers for the `sync=` of a plan.

        Raises:
            PlanError: the sync rule uses no servers.
        """
        found = SyncSpec.parse(sync).servers
        if found is None:
            raise PlanError("plan.no_servers", "sync={sync} has no servers", sync=sync)
        return found

    @property
    def processes(self) -> int:
        """Total number of server processes."""
        return self.parts * self.each


@dataclass(frozen=True)
class SyncInfo:
    """Description of a sync rule, readable without torch.

    The planner, the checks and the engine depend only on this description, never on the rule's name.

    Attributes:
        rule: import path of the class, which is called with the rule's arguments.
        exact: True if every update uses the mean of all replicas' gradients, up to rounding, without compression.
        every_step: True if the rule acts in every step, after which all replicas hold equal parameters.
        sends: what replicas send: gradients, parameters, or deltas, which are changes of parameters.
        arguments: maps the names of arguments to descriptions. The value after the colon has the name "" and comes
            first.
        check: function that returns a problem with the combination of arguments, or None.
        period: name of the argument with the number of steps between two synchronizations; None if the rule
            synchronizes in every step.
        compresses: True if the rule compresses the data that it sends. The codec of the plan's `compress=` is then
            passed as an argument.
        codes_alone: True if the elements of each rank are encoded separately. Codecs of sums do not support this.
        several_optimizers: True if the rule supports `replica.backward.only`, for models trained by several optimizers.
        needs_inner: True if the rule uses `replica.inner`, a process group of the ranks in its own replica.
        takes_rows: True if the rule accepts sparse gradients, which contain only the looked-up rows (see
            `sync/rows.py`).
        served: True if servers own the parameters. Workers then take microbatches of the global batches at their own
            speed, and no collective joins them between step boundaries.
        run_rank: import path of the function that each rank of a served run calls.
        servers: function that returns the servers for the rule's arguments; None if replicas reduce without servers.
        varies: function of all arguments that returns the fields of this description that depend on the arguments.
    """

    rule: str
    exact: bool
    every_step: bool
    sends: Literal["gradients", "parameters", "deltas"]
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    check: Callable[[Mapping[str, Any]], str | None] = lambda arguments: None
    period: str | None = None
    compresses: bool = False
    codes_alone: bool = False
    several_optimizers: bool = False
    needs_inner: bool = True
    takes_rows: bool = False
    served: bool = False
    run_rank: str = ""
    servers: Callable[[Mapping[str, Any]], ServerProcesses | None] = lambda arguments: None
    varies: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda arguments: {}

    @property
    def local_steps(self) -> bool:
        """True if replicas apply their own gradients and differ between synchronizations."""
        return not self.every_step or self.sends != "gradients"


def _check_diloco(arguments: Mapping[str, Any]) -> str | None:
    """Check that fragments are sent once per period, and arrive before the next sending."""
    period, fragments, overlap = arguments[""], arguments["fragments"], arguments["overlap"]
    if fragments > 1 and fragments > period:
        return f"{fragments} fragments need different steps of a period of {period}: use fragments={period} or less"
    if overlap and overlap >= period:
        return f"a fragment must arrive before it is sent again after {period} steps: use overlap={period - 1} or less"
    return None


OUTER_LR = Argument(between(0, 10, open_below=True), 0.7, "the outer learning rate, above 0")
OUTER_MOMENTUM = Argument(between(0, 0.9999), 0.9, "the outer Nesterov momentum, from 0 to below 1")
_PERIOD = Argument(whole(1), None, "the number of steps between synchronizations, at least 1")
RULES = ExtensionPoint(
    "rule",
    "paceline.sync_rules",
    SyncInfo,
    {
        "averaging": SyncInfo(
            "paceline.sync.averaging:Averaging",
            exact=True,
            every_step=True,
            sends="gradients",
            several_optimizers=True,
            needs_inner=False,
        ),
        "allreduce": SyncInfo(
            "paceline.sync.allreduce:AllReduce",
            exact=True,
            every_step=True,
            sends="gradients",
            arguments={"": Argument(one_of(("auto", *ALGORITHMS)), "auto", f"one of auto, {', '.join(ALGORITHMS)}")},
            compresses=True,
            several_optimizers=True,
            needs_inner=False,
            takes_rows=True,
        ),
        "local": SyncInfo(
            "paceline.sync.local:LocalSGD",
            exact=False,
            every_step=False,
            sends="parameters",
            arguments={"": _PERIOD},
            period="",
            several_optimizers=True,
        ),
        "diloco": SyncInfo(
            "paceline.sync.diloco:DiLoCo",
            exact=False,
            every_step=False,
            sends="deltas",
            arguments={
                "": _PERIOD,
                "fragments": Argument(
                    whole(1),
                    1,
                    "the number of parts of the model that are sent at different steps, at least 1",
                ),
                "overlap": Argument(
                    whole(0), 0, "the number of steps of training while a fragment is sent, at least 0"
                ),
                "lr": OUTER_LR,
                "momentum": OUTER_MOMENTUM,
            },
            check=_check_diloco,
            period="",
            compresses=True,
            several_optimizers=True,
        ),
    },
    PlanError,
)


@dataclass(frozen=True)
class SyncSpec:
    """Parsed value of `sync=`, such as `allreduce:ring`, `local:8` or `diloco:30,fragments=4,overlap=5`.

    The form is `NAME[:VALUE][,KEY=VALUE…]`.

    Attributes:
        name: name of a built-in rule, or of a rule that an installed package registers under the entry point
            `paceline.sync_rules`.
        arguments: values of the rule's arguments, including defaults; the value after the colon has the name "".
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> SyncSpec:
        """Parse the value of `sync=`.

        Raises:
            PlanError: a rule or argument is unknown, or a value is invalid; for unknown names, the error suggests a
                similar name.
        """
        name, given = pieces("sync", text)
        try:
            info = RULES[name]
        except PlanError as error:
            raise PlanError("plan.sync_refused", "sync={text}: {error}", text=text, error=error) from None
        arguments = converted(f"sync={text}", name, info.arguments, given)
        if problem := info.check(arguments):
            raise PlanError("plan.sync_invalid", "sync={text}: {problem}", text=text, problem=problem)
        return cls(name, arguments)

    @property
    def info(self) -> SyncInfo:
        """Description of the rule for these arguments."""
        info = RULES[self.name]
        changes = info.varies(self.arguments)
        return replace(info, **changes) if changes else info

    @property
    def servers(self) -> ServerProcesses | None:
        """Servers of the rule for these arguments; None if the rule uses no servers."""
        return self.info.servers(self.arguments)

    @property
    def period(self) -> int:
        """Number of steps between two synchronizations; 1 if replicas synchronize in every step."""
        period = self.info.period
        return 1 if period is None else int(self.arguments[period])


def sync_info(text: str) -> SyncInfo:
    """Return the description of the rule that a plan's `sync=` names.

    Raises the errors of `SyncSpec.parse`.
    """
    return SyncSpec.parse(text).info


def problem_with(key: str, value: object) -> str | None:
    """Return the problem with a value of `sync` or `compress`; None if it is valid."""
    if not isinstance(value, str) or not value:
        return f'{key} is text, e.g. {key}={"allreduce:ring" if key == "sync" else "int8"}, not "{value}"'
    if key == "compress" and value in ("none", "auto"):
        return None
    try:
        (SyncSpec if key == "sync" else CompressSpec).parse(value)
    except PlanError as error:
        return str(error)
    return None


# for gradients on slow links: sending begins early, but a message still takes long compared to its latency
BUCKET_BYTES_BETWEEN_HOSTS = 4 * 2**20
_LEAST_BUCKET_BYTES = 2**20


@dataclass(frozen=True)
class TransportInfo:
    """Description of a transport, readable without torch.

    Attributes:
        backend: import path of a function that creates a backend or process group for torch. It is called with
            `torch.distributed`'s options (store, group_rank, group_size, timeout, …). None if torch itself has the
            backend.
        one_host: True if all ranks must be on one host.
        within_hosts: False if its groups on one host use another transport under its name.
        shares_memory: True if tensors of a group lie in memory that its ranks share, as described in
            `paceline.comm.process_group.Transport`. Reductions in a step then take as long as reductions alone.
        obstacle: import path of a function of (store, rank, size, timeout_s), which all ranks call before they create a
            group. The function returns the reason why the ranks cannot use the transport, or None.
    """

    backend: str | None
    one_host: bool = False
    within_hosts: bool = True
    shares_memory: bool = False
    obstacle: str | None = None


TRANSPORTS = ExtensionPoint(
    "transport",
    "paceline.transports",
    TransportInfo,
    {
        "shm": TransportInfo(
            "paceline.comm.shm:create",
            one_host=True,
            shares_memory=True,
            obstacle="paceline.comm.transport:why_not_shared",
        ),
        "gloo": TransportInfo(None),
        "tcp": TransportInfo("paceline.comm.tcp:create", within_hosts=False),
    },
    PlanError,
    words=("auto",),
)


# choices of `auto`: within a host, between hosts, and within a host that allows no shared memory
WITHIN_HOST, BETWEEN_HOSTS, WITHOUT_SHARED_MEMORY = "shm", "tcp", "gloo"


def carriers(*, several_hosts: bool) -> tuple[str, ...]:
    """Return the names of the transports that work within a host or between hosts.

    Transports of installed packages are included. A transport whose description cannot be loaded is left out.
    """
    found = []
    for name in TRANSPORTS.names:
        with suppress(PlanError):
            info = TRANSPORTS[name]
            if not info.one_host if several_hosts else info.within_hosts:
                found.append(name)
    return tuple(found)


def problem_with_transport(name: object) -> str | None:
    """Return the problem with a value of `transport`; None if it is valid."""
    if name == "auto" or name in TRANSPORTS.built_in:
        return None
    if name in ("nccl", "rccl", "xccl"):
        return (
            f"{name} carries messages between GPUs, and ranks with GPUs use it automatically: leave transport out. "
            f"{devices_of_ranks()}"
        )
    if name not in TRANSPORTS.names:
        return f'transport is {" or ".join(("auto", *TRANSPORTS.names))}, not "{name}"'
    try:
        TRANSPORTS[str(name)]
    except PlanError as error:
        return str(error)
    return None


def devices_of_ranks() -> str:
    """Describe, for error texts, the devices that ranks use on this machine."""
    from paceline.cluster.machine import find_gpus  # slow import, needed only for a message

    try:
        found = find_gpus().devices
    except ClusterError as error:
        return str(error)
    if not found:
        return "paceline finds no GPU on this machine, so ranks use its cores. `paceline doctor` shows what it finds"
    return f"Ranks use the GPUs of this machine, {len(found)} x {found[0].name}. `paceline doctor` lists them"


def bucket_bytes_between_hosts(gradient_bytes: float) -> float:
    """Return the size of a gradient bucket in bytes, which is smaller for small models.

    Small buckets matter because the last bucket is sent only after the backward pass.
    """
    return min(BUCKET_BYTES_BETWEEN_HOSTS, max(_LEAST_BUCKET_BYTES, gradient_bytes / 8))
