"""Weight of a rank's loss in the global mean, in a user's own loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.data.loader import Loader, Position
from paceline.device import uploaded, widest_float
from paceline.errors import DataError


class LossShares:
    """Tracks which batches were read since the last loss.

    Args:
        loaders: all that the loop reads from; the list may grow.
        data_group: the ranks that read different samples.
    """

    def __init__(self, loaders: Sequence[Loader], data_group: Group, device: torch.device) -> None:
        self.loaders, self.data_group, self.device = loaders, data_group, device
        # where each loader stood at the last loss
        self._seen: dict[int, Position] = {}
        self._read_ahead = False

    def forget(self) -> None:
        """Start anew, as after a checkpoint was loaded."""
        self._seen.clear()

    def weigh(self, loss: Tensor, items: float | Tensor | None, *, local_steps: bool) -> tuple[float | Tensor, Tensor]:
        """This rank's share of the global mean, and that mean.

        Args:
            items: what the loss is the mean over; None: the samples of the loaders' last batch.
            local_steps: True if this replica steps by its own mean.
        """
        wide = widest_float(self.device)
        own = loss.detach().to(wide).reshape(())
        if items is None:
            share = self._share()
            mean = (own * share).to(self.device) if share else torch.zeros((), dtype=wide, device=self.device)
            self.data_group.all_reduce(mean)
            return 1.0 if local_steps and share else share, mean
        count = items.to(self.device, wide) if isinstance(items, Tensor) else uploaded([items], wide, self.device)[0]
        sums = torch.stack([torch.where(count > 0, own * count, 0.0), count])
        self.data_group.all_reduce(sums)
        total = sums[1].clamp(min=torch.finfo(wide).tiny)
        own_share: Tensor = (count > 0) if local_steps else count / total
        return own_share.to(loss.dtype), sums[0] / total

    def check_data(self) -> None:
        """Raise DataError where a batch was not read from a dealt loader.

        All ranks would train on data of their own.
        """
        if self.data_group.size > 1 and self.loaders and all(loader.position is None for loader in self.loaders):
            raise DataError(
                "setup was given a DataLoader, and this loss is of other data: nothing was read from engine.loader "
                "yet. Write `for batch in engine.loader`, which is this rank's part; or give setup no loader, where "
                "every rank brings its own data"
            )

    def _share(self) -> float:
        """This rank's fraction of the global batch that its loss is the mean of.

        Raises:
            DataError: it is not known which batch that is.
        """
        # not one that was iterated to its end, to validate
        running = [loader for loader in self.loaders if loader.running] or self.loaders
        seen = {
            id(loader): (loader.position, self._seen.get(id(loader)))
            for loader in running
            if loader.position is not None
        }
        for loader in running:
            loader.check_weight()
        shares = {position.local / position.total for position, _ in seen.values()}
        if len(shares) > 1:
            raise DataError(
                "the loaders' last batches are dealt in different proportions, so the weight of this loss is not "
                "known: say what it is the mean of, engine.backward(loss, items=len(x))"
            )
        self._read_ahead = self._read_ahead or any(_skipped(before, now) for now, before in seen.values())
        share = shares.pop() if shares else 1.0 / self.data_group.size
        if self._read_ahead and any(
            before is not None and before.local / before.total != share for _, before in seen.values()
        ):
            raise DataError(
                "the loop reads batches ahead of their losses, and they are dealt in different proportions, so "
                "the weight of this loss is "
                "not known: say what it is the mean of, engine.backward(loss, items=len(x)), or set drop_last=True"
            )
        self._seen |= {number: now for number, (now, _) in seen.items()}
        return share


def _skipped(before: Position | None, now: Position) -> bool:
    """True if more than one batch was read since the last loss."""
    if before is None:
        return now.epoch == 0 and now.step == 1
    return now.step > before.step + 1 if now.epoch == before.epoch else now.step > 0
