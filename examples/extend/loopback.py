"""A transport: gloo over the loopback interface only, so that nothing of a trial leaves the host."""

from typing import Any

from paceline.planning.sync_info import TransportInfo

INFO = TransportInfo("loopback:create", one_host=True)


def create(options: Any, _: Any) -> Any:
    """Make the backend; torch calls this for every group, with where its ranks meet."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    settings = gloo._Options()
    settings._devices = [gloo.create_device(interface="lo")]
    settings._timeout = options.timeout
    return gloo(options.store, options.group_rank, options.group_size, settings)
