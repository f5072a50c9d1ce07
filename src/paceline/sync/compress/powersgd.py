"""Approximate sums of matrices with low-rank factors.

The method is PowerSGD (Vogels, Karimireddy & Jaggi, 2019, arXiv:1905.13727).

Each sum takes one step of power iteration, which starts from the previous result. P is the orthonormalized sum of M Q,
Q is the sum of M^T P, and the sum of M is approximately P Q^T. The part of a rank's M outside of P's column space is
added to the next M. The coding errors of Q and of the sum of Q are also added to the next M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.checks import same_machines
from paceline.sync.compress.codecs import Coding
from paceline.sync.compress.compressor import TwoPhase, square

# a matrix is factored only if the factors have at most half its elements, as in PyTorch's PowerSGD
_GAIN = 2


class PowerSGD:
    """Sum of matrices with low-rank factors (PowerSGD).

    A step takes two sums, each in two phases. The messages with P also contain vectors, small matrices and values after
    the views, which are summed exactly. A view of more than two dimensions counts as a matrix whose columns combine all
    dimensions but the first. One fp32 number per matrix element is kept between steps.

    Args:
        coding: arguments of the codec; `value` is the rank of the factors, and `numbers` encodes the elements of P and
            Q.
    """

    def __init__(self, coding: Coding) -> None:
        group, flat, views, codec = coding.group, coding.flat, coding.views, coding.numbers
        assert codec is not None
        self.group, self.traffic, self.scratch = group, coding.traffic, coding.scratch
        # True if all ranks compute bit-equal results from equal inputs; if not, rank 0 orthonormalizes P for all ranks
        self.identical_machines = same_machines(group)
        self.batches = _batches(views, coding.value)
        matrices = {i for batch in self.batches for i in batch.places}
        self.vectors = [i for i in range(len(views)) if i not in matrices]
        self.numel = sum(view.numel() for view in views)
        exact = flat.numel() - sum(views[i].numel() for i in matrices)
        last = self.batches[-1]
        self.p_phases = TwoPhase(group, codec, last.p.stop, exact)
        self.q_phases = TwoPhase(group, codec, last.q.stop, 0)
        self.error = torch.zeros(last.matrices.stop, device=group.device)
        random = torch.Generator().manual_seed(last.q.stop)  # the same numbers on every rank
        self.q = torch.randn(self.q_phases.numel, generator=random).to(group.device)

    def sum(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        matrices = self.scratch.get("coded", self.error.numel())
        for batch in self.batches:
            for i, matrix, error in zip(
                batch.places, batch.of_matrices(matrices), batch.of_matrices(self.error), strict=True
            ):
                torch.add(views[i], error.view(views[i].shape), out=matrix.view(views[i].shape))
        signal = square(matrices)
        p = self._sum_p(matrices, flat, views, finite=math.isfinite(signal))
        kept = p is not None and self._sum_q(matrices, p)
        if not kept:
            flat[: self.numel] = math.nan
            return
        for batch in self.batches:
            for i, matrix in zip(batch.places, batch.of_matrices(matrices), strict=True):
                views[i].copy_(matrix.view(views[i].shape))
        self.traffic.signal_square += signal
        self.traffic.error_square += square(self.error)

    def _sum_p(self, matrices: Tensor, flat: Tensor, views: Sequence[Tensor], *, finite: bool) -> Tensor | None:
        """Compute the orthonormal P of all matrices, equal on every rank.

        The result is None if a number is not finite. Exact parts are summed in the same messages.
        """
        p = self.scratch.filled("p", self.p_phases.numel, matrices[:0])
        for batch in self.batches:
            torch.bmm(batch.of_q(self.q), batch.of_matrices(matrices).mT, out=batch.of_p(p))
        vectors, tail = [views[i] for i in self.vectors], flat[self.numel :]
        together = torch.cat([tail.float(), *(vector.reshape(-1).float() for vector in vectors)])
        finite = finite and bool(torch.isfinite(together[len(tail) :].sum()))
        exact = self.scratch.filled("exact", self.p_phases.share * self.group.size, together)
        done = self.p_phases.sum(self._rows(p), self._rows(exact), finite=finite)
        for part, summed in zip(
            (tail, *vectors), exact[: len(together)].split([len(tail), *(v.numel() for v in vectors)]), strict=True
        ):
            part.copy_(summed.view(part.shape))
        if not done:
            return None
        self.p_phases.read(p)
        for batch in self.batches:
            thin = batch.of_p(p)
            thin.copy_(torch.linalg.qr(thin.mT).Q.mT)
        if not self.identical_machines:
            self.group.broadcast(p)
        return p

    def _sum_q(self, matrices: Tensor, p: Tensor) -> bool:
        """Replace each matrix with P times the sum of Q, and keep the error.

        The result is False if a number is not finite.
        """
        q = self.scratch.filled("q", self.q_phases.numel, p[:0])
        for batch in self.batches:
            torch.bmm(batch.of_p(p), batch.of_matrices(matrices), out=batch.of_q(q))
        own, lost = q.clone(), torch.empty_like(q)
        lost_of_sum = torch.zeros(self.q_phases.chunk, device=q.device)
        if not self.q_phases.sum(self._rows(q), self._rows(q[:0]), error=self._rows(lost), sum_error=lost_of_sum):
            return False
        self.q_phases.read(q)
        own.sub_(lost)
        self._rows(own)[self.group.rank].sub_(lost_of_sum)  # the rank that encoded the sum keeps its coding error
        for batch in self.batches:
            thin, matrix = batch.of_p(p).mT, batch.of_matrices(matrices)
            torch.baddbmm(matrix, thin, batch.of_q(own), alpha=-1, out=batch.of_matrices(self.error))
            torch.bmm(thin, batch.of_q(q), out=matrix)
            # Only the directions matter for the next step. Unit length keeps P within the range of 16-bit numbers;
            # zeros stay zero.
            length = torch.linalg.vector_norm(batch.of_q(q), dim=2, keepdim=True)
            batch.of_q(self.q).copy_(torch.where(length > 0, batch.of_q(q) / length, batch.of_q(self.q)))
        return True

    def _rows(self, numbers: Tensor) -> Tensor:
        return numbers.view(self.group.size, -1) if len(numbers) else numbers.view(self.group.size, 0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"error": self.error, "q": self.q}


def powersgd(coding: Coding) -> PowerSGD | None:
    """Create the codec `powersgd:RANK`; return None if no matrix is large enough to benefit."""
    gains = any(factors(view.shape, coding.value) is not None for view in coding.views)
    return PowerSGD(coding) if gains else None


@dataclass(frozen=True)
class _Batch:
    """Matrices of one shape and their offsets; the matrices are multiplied as a batch.

    Factors have the shapes (rank, rows) and (rank, columns). With the long side last, products are several times
    faster.
    """

    places: list[int]  # indices among the views
    rows: int
    columns: int
    rank: int
    matrices: slice
    p: slice
    q: slice

    def of_matrices(self, flat: Tensor) -> Tensor:
        return flat[self.matrices].view(-1, self.rows, self.columns)

    def of_p(self, flat: Tensor) -> Tensor:
        return flat[self.p].view(-1, self.rank, self.rows)

    def of_q(self, flat: Tensor) -> Tensor:
        return flat[self.q].view(-1, self.rank, self.columns)


def factors(shape: Sequence[int], rank: int) -> tuple[int, int, int] | None:
    """Return rows, columns and rank of a tensor's factors; None if factoring is useless.

    The first dimension gives the rows, and all others the columns. Tensors that are empty, too small, or have fewer
    than two dimensions have no factors.
    """
    if len(shape) < 2 or 0 in shape:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rank, rows, columns)
    return (rows, columns, rank) if _GAIN * rank * (rows + columns) <= rows * columns else None


def _batches(views: Sequence[Tensor], rank: int) -> list[_Batch]:
    by_shape: dict[tuple[int, int, int], list[int]] = {}
    for i, view in enumerate(views):
        if (shape := factors(view.shape, rank)) is not None:
            by_shape.setdefault(shape, []).append(i)
    batches: list[_Batch] = []
    matrices = p = q = 0
    for (rows, columns, thin), places in by_shape.items():
        ends = matrices + len(places) * rows * columns, p + len(places) * thin * rows, q + len(places) * thin * columns
        batches.append(
            _Batch(places, rows, columns, thin, slice(matrices, ends[0]), slice(p, ends[1]), slice(q, ends[2]))
        )
        matrices, p, q = ends
    return batches
