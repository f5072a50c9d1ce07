"""New process groups among some ranks of another one, made by these ranks alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from paceline.comm.c10d.transport import register
from paceline.comm.transport import SEVERAL_HOSTS, choose
from paceline.planning.transport_info import BETWEEN_HOSTS, TRANSPORTS

# how often each set of ranks was asked for, by parent
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


def make_process_group(
    parent: dist.ProcessGroup, ranks: Sequence[int], deadline_s: float, *, share_memory: bool, spread: bool
) -> tuple[dist.ProcessGroup, Store]:
    """A process group of some ranks of `parent`, and the store that they met in.

    `ranks` are numbers in `parent`, ascending.

    Only these ranks call it, all of them. With `share_memory` they are on one host, and talk over its memory where that
    is allowed; else the group has the parent's backend. `spread`: they are known to be on several hosts.

    `dist.new_group` names a group made by its members alone by the number of groups that each process has. Ranks that
    made different groups before would wait under different names, and one made again would find the keys of its
    predecessor. So the name comes from here: the parent's, the ranks, and how often these asked.
    """
    everyone = dist.get_process_group_ranks(parent)
    members = [everyone[r] for r in ranks]
    own_rank, timeout = members.index(dist.get_rank()), timedelta(seconds=deadline_s)
    readable = f"{parent.group_name}/{'+'.join(map(str, ranks))}"
    counts = _made.setdefault(parent, Counter())
    counts[readable] += 1
    name = distributed_c10d.GroupName(
        hashlib.sha1(f"{readable}/{counts[readable]}".encode(), usedforsecurity=False).hexdigest()
    )
    store = PrefixStore(name, distributed_c10d._get_default_store())
    backend = dist.get_backend(parent)
    if share_memory:
        found, _ = choose(store, own_rank, len(members), "auto", deadline_s)
        if TRANSPORTS[found].one_host:
            register(found)
            backend = dist.Backend(found)
    with _not_split_from_the_default_group():
        made, _ = distributed_c10d._new_process_group_helper(
            len(members),
            own_rank,
            members,
            backend,
            distributed_c10d._get_default_store(),
            name,
            backend_options=SEVERAL_HOSTS if spread and backend == BETWEEN_HOSTS else None,
            timeout=timeout,
            group_desc=readable,
        )
    distributed_c10d._world.pg_group_ranks[made] = {member: r for r, member in enumerate(members)}
    return made, store


@contextmanager
def _not_split_from_the_default_group() -> Iterator[None]:
    """Prevent a split of the default group's communicator.

    With a default group that is bound to a device it would, and every rank of that would have to take part.
    """
    default = distributed_c10d._get_default_group()
    device = default.bound_device_id
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device
