"""Comparison of replicas by digests, and renormalization of embeddings with `max_norm`."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.comm import Group
from paceline.comm.checks import greatest, same_machines
from paceline.device import widened
from paceline.errors import JobError, SyncError
from paceline.planning.model.recorder import has_max_norm
from paceline.planning.plan import AXES, DATA_AXES
from paceline.planning.sync_info import sync_info
from paceline.split.layout import local
from paceline.sync.batchnorm import is_synchronised
from paceline.sync.rule import broadcast_tensors
from paceline.wire.status import refuse_aborted

if TYPE_CHECKING:
    from paceline.engine.engine import RankEngine


_AXES = tuple(axis for axis in AXES if axis != "pp")
_COLUMNS = 4096
# multiples of the dtype's resolution: tolerated difference between ranks that do not compute the same bits
_ROUNDING = 64


class ReplicaState:
    """Comparison of tensors that should be equal on several ranks.

    The ranks compare digests before updates 1, 2, 4, …, and later every `Settings.compare_every` updates.

    Before the same updates, every rank verifies that the frozen base of adapters is unchanged, because no state of a
    rank includes the base.

    A digest reads the parameters once, so it costs less than an update. Ranks compare only if the sync rule keeps the
    replicas equal at every step. Buffers that checkpoints contain are compared among the ranks that read different
    samples. Batch-norm statistics that each replica keeps for itself are not compared.

    Attributes:
        due: number of the next update that needs a call of `before_update`.
        corruption: repairs a rank that differs from the majority of ranks, and records the repair.
        base: verifies that the frozen base of adapters is unchanged.
    """

    def __init__(self, engine: RankEngine) -> None:
        self.engine = engine
        self.max_norm = MaxNorm(engine)
        self.corruption = Corruption(engine)
        self.base = FixedBase(engine)
        identical = not sync_info(engine.plan.sync).local_steps
        self._compares = identical and engine.group.size > 1 and not engine.group.is_fake
        self.due: float = 1 if self._compares or self.base.names or self.max_norm.tables else math.inf

    def before_update(self, update: int) -> None:
        """Synchronize parameters that forward passes changed, and compare ranks if necessary.

        Args:
            update: number of the next update, counted from 1.

        Raises:
            SyncError: ranks differ in a parameter or buffer, and either no majority has equal values or one rank
                differs repeatedly. The message names the tensor and the ranks.
            JobError: the frozen base of adapters has changed.
        """
        self.max_norm.renormalize()
        self.due = (
            update + 1 if self.max_norm.tables else next(n for n in count(update + 1) if self._compared_before(n))
        )
        if self._compares and self._compared_before(update):
            for group, named, strict in self._held_alike():
                if differing := _differing(group, named):
                    self._mend(group, named, differing, strict=strict)
            self._compare_stages()
            if self.engine.split is not None and greatest(self.engine.group, len(self.corruption.found)):
                self.corruption.tell_all()
        if self._compared_before(update):
            self.base.check()

    def close(self) -> None:
        """Release the model."""
        self.max_norm.close()

    def _compared_before(self, update: int) -> bool:
        every = self.engine.settings.compare_every
        return update % every == 0 or (update < every and update.bit_count() == 1)

    def _held_alike(self) -> Iterator[tuple[Group, dict[str, Tensor], bool]]:
        """Yield each group of ranks, the tensors to compare, and whether to compare bitwise."""
        engine, split = self.engine, self.engine.split
        parameters = {name: local(p).detach() for name, p in engine.named_parameters().items()}
        named = engine.named_parameters()
        copies = {copy.key: copy.named(named) for copy in engine.copies}
        if split is None:
            yield engine.group, parameters | _as_copies(copies, parameters) | self._buffers(), True
            return
        for axis in _AXES:
            if split.mesh.sizes[axis] > 1:
                alike = {name: p for name, p in parameters.items() if axis not in split.parts[name].sharded}
                alike |= _as_copies(copies, alike)
                # Ranks that divide a layer compute their common tensors from different partial sums,
                # so the copies are only approximately equal.
                yield split.mesh.group(axis), alike, axis in DATA_AXES
        if engine.data_group.size > 1 and (buffers := self._buffers()):
            yield engine.data_group, buffers, True

    def _compare_stages(self) -> None:
        split = self.engine.split
        shared = split.pipeline.shared if split is not None and split.pipeline is not None else {}
        if split is None or not shared or not same_machines(group := split.mesh.group("pp")):
            return
        parameters = self.engine.named_parameters()
        held = {name: local(parameters[name]).detach() for name in shared if name in parameters}
        if differing := _differing(group, held, list(shared)):
            self._refuse(group, {name: int(_digest(held[name])) for name in differing if name in held})

    def _buffers(self) -> dict[str, Tensor]:
        if self.engine.settings.buffers == "local":
            return {}
        persistent = {id(t) for t in self.engine.model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
        own = {
            id(buffer)
            for module in self.engine.model.modules()
            if _keeps_its_own(module)
            for buffer in module.buffers(recurse=False)
        }
        return {
            n: b.detach() for n, b in self.engine.named_buffers().items() if id(b) in persistent and id(b) not in own
        }

    def _mend(self, group: Group, named: Mapping[str, Tensor], differing: list[str], *, strict: bool) -> None:
        if not (strict and same_machines(group)) and all(_is_rounding(group, named[name]) for name in differing):
            for name in differing:
                group.broadcast(named[name])
            self.engine.messages.append(
                f"{differing[0]} and {len(differing) - 1} more differed by rounding between ranks, which do not "
                f"compute alike; all have the values of the first of them again since step {self.engine.step_count + 1}"
            )
            return
        digests = {name: int(_digest(named[name])) for name in differing}
        if not self.corruption.heal(group, named, digests):
            self._refuse(group, digests)

    def _refuse(self, group: Group, digests: Mapping[str, int]) -> None:
        found = group.gather_json([self.engine.group.rank, dict(digests)])
        differing = list(dict.fromkeys(name for _, digests in found for name in digests))
        parameters = self.engine.named_parameters()
        name = next((name for name in differing if name in parameters), differing[0])
        holders = [(rank, digests[name]) for rank, digests in found if name in digests]
        others = ", ".join(str(rank) for rank, digest in holders if digest != holders[0][1])
        rest = [n for n in differing if n != name]
        more = (
            f" (and so {'is' if len(rest) == 1 else 'are'} {', '.join(rest[:5])}{', …' if len(rest) > 5 else ''})"
            if rest
            else ""
        )
        what, instead = ("parameter", _PARAMETER) if name in parameters else ("buffer", _BUFFER)
        raise SyncError(
            "ranks.state_differs",
            "step {step}: {what} {name!r} differs between rank {others} and rank {holders}{more}. Nothing was "
            "updated. {advice}",
            step=self.engine.step_count + 1,
            what=what,
            name=name,
            others=others,
            holders=holders[0][0],
            more=more,
            advice=instead,
        )


class FixedBase:
    """Verification that the frozen base of adapters has not changed.

    Attributes:
        names: the frozen parameters; none if states include them.
    """

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine
        kept = engine.settings.keeps_base and not engine.group.is_fake
        self.names = [name for name, p in engine.named_parameters().items() if kept and not p.requires_grad]
        self._first: Tensor | None = None

    def remember(self) -> None:
        """Compute digests before the first step."""
        if self.names and self._first is None:
            self._first = self._digests()

    def check(self) -> None:
        """Compare the base with the base before the first step.

        Raises:
            JobError: a parameter has changed.
        """
        if self._first is None:
            return
        differs = (self._digests() != self._first).tolist()
        changed = [name for name, differ in zip(self.names, differs, strict=True) if differ]
        if changed:
            raise JobError(
                "adapter.base_changed",
                "step {step}: {name} has changed, although only adapters are trained. Checkpoints and replacements of "
                "lost ranks have no frozen parameters, so the change would be lost. If the model's forward method "
                "changes {name}, make it a buffer (register_buffer), or train it: adapter.lora.train: [{name}]",
                step=self._engine.step_count + 1,
                name=changed[0],
            )

    def _digests(self) -> Tensor:
        held = self._engine.named_parameters()
        return torch.stack([_digest(local(held[name]).detach()) for name in self.names])


_PARAMETER = (
    "Under sync=allreduce, parameters must be equal on all ranks. Most likely, the model or the script changes "
    "parameters outside of the optimizer, with a rank's own samples or random numbers. Use values that are equal on "
    "all ranks (torch.distributed.all_reduce), or train on one rank."
)
_BUFFER = (
    "The model's forward method changes this buffer with a rank's own samples, so replicas would train different "
    "models. Reduce the values over all ranks (torch.distributed.all_reduce in forward), or keep the buffer out of the "
    "state (persistent=False). If each replica may keep its own buffer, set buffers: local (buffers='local' in "
    "setup); evaluations and exports then use the mean."
)


def _as_copies(copies: Mapping[str, Mapping[str, Tensor]], names: Collection[str]) -> dict[str, Tensor]:
    """Return the copies of the named parameters, such as their moving averages, under separate names."""
    return {f"{n} ({key})": tensor for key, held in copies.items() for n, tensor in held.items() if n in names}


def _keeps_its_own(module: nn.Module) -> bool:
    """Return True if a module's running statistics belong to one replica (batch_norm: local)."""
    return isinstance(module, _NormBase) and not is_synchronised(module)


def _differing(group: Group, held: Mapping[str, Tensor], names: Sequence[str] = ()) -> list[str]:
    names = names or list(held)
    if not names:
        return []
    nothing = torch.zeros((), dtype=torch.int64, device=group.device)
    digests = torch.stack([_digest(held[name]) if name in held else nothing for name in names])
    # float32 represents 16-bit integers exactly
    quarters = torch.cat([digests >> shift & 0xFFFF for shift in (0, 16, 32, 48)]).float()
    together = torch.cat([quarters, -quarters]).view(2, 4, -1)
    together[..., [name not in held for name in names]] = -math.inf
    group.all_reduce(together, "max")
    largest, smallest = together
    differs = (largest != -smallest).any(dim=0).tolist()
    refuse_aborted()
    return [name for name, one in zip(names, differs, strict=True) if one]


def _digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of a tensor.

    The digest is the sum of the tensor's words, weighted by odd numbers, modulo 2^64.
    """
    words = _words(tensor)
    weights = _weights(words.device)
    rows = len(words) // _COLUMNS
    head, tail = words[: rows * _COLUMNS], words[rows * _COLUMNS :]
    return (head.view(rows, _COLUMNS).sum(dim=0) * weights).sum() * 3 + (tail * weights[: len(tail)]).sum()


def _words(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.reshape(-1).contiguous()
    size = flat.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).to(torch.int64)


_made: dict[torch.device, Tensor] = {}


def _weights(device: torch.device) -> Tensor:
    if device not in _made:
        random = torch.Generator().manual_seed(64)
        _made[device] = (torch.randint(-(2**62), 2**62, (_COLUMNS,), generator=random, dtype=torch.int64) * 2 + 1).to(
            device
        )
    return _made[device]


def _is_rounding(group: Group, tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    extremes = widened(torch.stack([tensor.reshape(-1), -tensor.reshape(-1)]))
    group.all_reduce(extremes, "max")
    apart = (extremes[0] + extremes[1]).abs().max()
    return bool(apart <= _ROUNDING * torch.finfo(tensor.dtype).eps * extremes.abs().max())


class MaxNorm:
    """Renormalization of embedding rows on all ranks, instead of in torch's forward pass.

    A row is renormalized once per step: before its first lookup, or before the update on ranks that did not look up the
    row. All ranks apply the same operation to the same bits, so their parameters stay equal. The rows are also
    renormalized at the end of an evaluation. A later checkpoint or export then has the same rows as in a run on one
    process.
    """

    def __init__(self, engine: RankEngine) -> None:
        self.group = engine.group
        alone = engine.local_steps or engine.split is not None or self.group.size == 1
        self.tables: list[_Table] = (
            [] if alone else [_Table(module) for module in engine.model.modules() if has_max_norm(module)]
        )

    def renormalize(self) -> None:
        """Renormalize the rows that only other ranks looked up since the last update."""
        for table in self.tables:
            anywhere = table.seen.clone()
            self.group.all_reduce(anywhere, "max")
            table.shorten((anywhere > table.seen).nonzero()[:, 0])
            table.seen.zero_()

    def close(self) -> None:
        """Let the embeddings renormalize their rows themselves again."""
        for table in self.tables:
            table.close()
        self.tables = []


class _Table:
    """One embedding with `max_norm`.

    Attributes:
        seen: 1 for each row that this rank has looked up since the last update, else 0.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.max_norm = module, module.max_norm
        module.max_norm = None
        self.seen = torch.zeros(module.num_embeddings, device=module.weight.device)
        self._hook = module.register_forward_pre_hook(self._look_up, with_kwargs=True)

    def shorten(self, rows: Tensor) -> None:
        if len(rows):
            with torch.no_grad():
                torch.embedding_renorm_(self.module.weight.detach(), rows, self.max_norm, self.module.norm_type)

    def close(self) -> None:
        self._hook.remove()
        self.module.max_norm = self.max_norm

    def _look_up(self, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given: Tensor = args[0] if args else keywords["input"]
        rows = given.detach().reshape(-1).unique().long()
        rows = rows[self.seen[rows] == 0]
        self.shorten(rows)
        self.seen[rows] = 1.0


MOST = 2  # number of times that a rank is restored; the next difference ends the run


@dataclass
class Corruption:
    """Repair of ranks whose values differ from the majority's values.

    Attributes:
        found: details of each repair, for the run's record.
        members: process number of each rank, for messages and counts; None if process numbers equal ranks.
        times: process number of the repaired rank, one entry per repair in the run.
    """

    engine: RankEngine
    found: list[dict[str, Any]] = field(default_factory=list)
    members: Sequence[int] | None = None
    times: list[int] = field(default_factory=list)

    def heal(self, group: Group, named: Mapping[str, Tensor], digests: Mapping[str, int]) -> bool:
        """Copy the majority's state to the other ranks; return False if there is no majority.

        A rank that differs checks its device first. The event of the repair contains the result of this check.

        Every rank of the group must call this method.

        Args:
            named: parameters and buffers that should be equal on all ranks; their optimizer state is copied, too.
            digests: digests of the tensors that differ between ranks.

        Raises:
            SyncError: the same rank differs again after the last allowed repair.
        """
        own = [self._member(), socket.gethostname(), dict(digests)]
        everyones = group.gather_json(own)
        votes = Counter(tuple(held.values()) for _, _, held in everyones)
        majority, count = votes.most_common(1)[0]
        if 2 * count <= group.size:
            return False
        source = next(i for i, (_, _, held) in enumerate(everyones) if tuple(held.values()) == majority)
        right = everyones[source][2]
        verdicts = group.gather_json(self._device_faults(group.device) if own[2] != right else None)
        for (rank, host, held), verdict in zip(everyones, verdicts, strict=True):
            if wrong := [name for name in held if held[name] != right[name]]:
                self._note(rank, host, wrong, everyones[source][0], verdict)
        broadcast_tensors(group, [*named.values(), *self._optimizer_state(named)], source)
        return True

    def tell_all(self) -> None:
        """Send the repairs of each group to all ranks; every rank must call this."""
        known = {(d["step"], d["rank"]): d for found in self.engine.group.gather_json(self.found) for d in found}
        self.found = list(known.values())

    def _device_faults(self, device: torch.device) -> dict[str, int]:
        from paceline.comm.measure.health import device_faults  # few runs need it

        return device_faults(device)

    def _member(self) -> int:
        rank = self.engine.group.rank
        return rank if self.members is None else self.members[rank]

    def _note(self, rank: int, host: str, wrong: list[str], source: int, verdict: dict[str, int]) -> None:
        step = self.engine.step_count + 1
        self.times.append(rank)
        times = self.times.count(rank)
        if times > MOST:
            raise SyncError(
                "ranks.state_corrupted",
                "step {step}: the values of {name!r} on rank {rank} (host {host}) differ from those on most ranks, "
                "for the {times}rd time. Nothing was updated. Check the memory of that host, or train without it. "
                "Or look for code that changes parameters or buffers on one rank only.",
                step=step,
                rank=rank,
                host=host,
                name=wrong[0],
                times=times,
            )
        self.found.append(
            {
                "step": step,
                "rank": rank,
                "host": host,
                "tensors": wrong[:5],
                "more": len(wrong[5:]),
                "healed_from": source,
                "times": times,
                "device": verdict,
            }
        )

    def _optimizer_state(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        state = self.engine.optimizer.state
        parameters = {name: p for name, p in self.engine.named_parameters().items() if name in named}
        kept = [value for p in parameters.values() for _, value in sorted(state.get(p, {}).items())]
        return [local(value).detach() for value in kept if isinstance(value, Tensor)]
