"""Error of a rank that ran out of memory, with a plan that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil

from paceline.cluster.probe import telemetry_of
from paceline.device import memory, wanted_bytes
from paceline.errors import LaunchError, PlanError, Problem, proposal
from paceline.planning.cost.memory import RUNTIME_BYTES
from paceline.rank_environment import own_rank
from paceline.run.record.memory import MemoryTable, predicted_parts, table_of
from paceline.run.record.run import Run
from paceline.units import size

if TYPE_CHECKING:
    import torch

    from paceline.engine.engine import RankEngine

# if more bytes of a device are outside of the rank's allocator, other processes hold memory, too
_FOREIGN_BYTES = 2 * RUNTIME_BYTES
_ALONE = 0.8  # largest share of a device that the other ranks used if one rank ran out alone


@contextmanager
def shortage_explained(device: torch.device, engine: Callable[[], RankEngine | None]) -> Iterator[None]:
    """If memory runs out in this context, raise an error with the memory by part.

    On a device, another attempt may succeed only if other processes held memory.

    Raises:
        PlanError: memory ran out on the device, or on the host if the device is a CPU.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if (wanted := wanted_bytes(cause)) is not None:
                raise _shortage(wanted, device, engine()) from error
            cause = cause.__cause__
        raise


def _shortage(wanted: int, device: torch.device, engine: RankEngine | None) -> PlanError:
    from paceline.engine.memory import measured_parts, tensor_bytes  # the launcher does not use torch

    counted, others, foreign = memory(device), "", True
    if counted is None:
        host = psutil.virtual_memory()
        used, free, limit, elsewhere = psutil.Process().memory_info().rss, host.available, host.total, 0
    else:
        used, free, limit, elsewhere = counted.peak_reserved, counted.free, counted.total, counted.elsewhere
        if foreign := elsewhere > _FOREIGN_BYTES:
            found = telemetry.other_processes() if (telemetry := telemetry_of(device)) is not None else []
            named = ", ".join(f"process {pid} holds {size(held)}" for pid, held in found)
            others = f"; {named or f'other processes hold {size(elsewhere)}'}"
    # fields for programs, and for the launcher's table
    facts = {
        "wanted_bytes": wanted,
        "used_bytes": used,
        "limit_bytes": limit,
        "elsewhere_bytes": elsewhere,
        "parts": {} if engine is None else measured_parts(tensor_bytes(engine), counted),
        "on_host": counted is None,
    }
    return PlanError(
        "plan.ran_out_of_memory",
        "rank {rank} ran out of memory on {device} in step {step}{needed}: {free} of {limit} were free{others}.",
        rank=own_rank(),
        device=device,
        step=0 if engine is None else engine.step_count + 1,
        needed=f", when it needed another {size(wanted)}" if wanted else "",
        free=size(free),
        limit=size(limit),
        others=others,
        from_users_code=True,
        may_pass=foreign,
        **facts,
    )


def add_table(failure: LaunchError, run: Run) -> None:
    """Add the memory by part and a plan that fits to a run's error.

    Errors with other causes stay unchanged. If the host's kernel killed the rank, the measured memory is from the
    rank's last record.
    """
    from paceline.planning.fitting import plan_that_fits  # imports the cost model, which most runs do not need

    known, plan, rank = failure.fields, run.plan, failure.rank
    ran_out = failure.code == "plan.ran_out_of_memory"
    if not ran_out and not failure.out_of_memory:
        return
    steps, nearest = {number: run.steps(number) for number in range(plan.ranks)}, None
    predicted = predicted_parts(run.job, run.cluster, plan) or {}
    table = table_of({rank: steps.pop(rank)}, (), plan, predicted) or MemoryTable({}, None, predicted)
    room, lines, cause = None, [], failure.problems[0].text.replace(failure.traceback, "").strip()
    if ran_out:
        table = MemoryTable(known["parts"], known["used_bytes"], predicted, "at failure")
    if ran_out and not known["on_host"]:
        room = float(known["limit_bytes"] - known["elsewhere_bytes"])
        others = table_of(steps, (), plan, {})
        if others is not None and (others.total or 0.0) < _ALONE * room:
            lines = [f"Only rank {rank} ran out of memory: the others used at most {size(others.total or 0.0)}."]
    with suppress(Exception):  # the search builds the user's model, whose errors must not hide this one
        least = table.measured.get("activations", 0.0) + known.get("wanted_bytes", 0)
        nearest = plan_that_fits(run.job, plan, run.cluster, activations_bytes=least, room_bytes=room)
    lines.append(proposal(nearest).text if nearest else "No plan that fits was found. Use a smaller global_batch.")
    problem = Problem.of_parts(failure.code, "{text}", {"text": cause})
    problem.fields = known | {"predicted": predicted, "nearest": nearest and str(nearest)}
    failure.problems = (problem,)
    failure.args = ("\n".join([cause, *table.lines(), *lines, "", failure.traceback]).rstrip(),)
