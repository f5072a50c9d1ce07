"""The ranks that tests run on."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from ranks import RankError, Ranks


@dataclass(frozen=True)
class Share:
    """A class of this file, to cross into the ranks and back."""

    values: list[float]


def add_up(share: Share) -> Share:
    total = torch.tensor(share.values) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return Share(total.tolist())


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such label")
    dist.all_reduce(torch.zeros(1))


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def do_nothing() -> int:
    return 1


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_ranks_compute_together_and_return_their_results_in_order(ranks: Ranks) -> None:
    assert ranks(3, add_up, Share([1.0, 2.0])) == [Share([6.0, 12.0])] * 3


def test_a_rank_that_ends_at_once_fails_none_that_still_connects(ranks: Ranks) -> None:
    for _ in range(6):  # eight ranks on two cores: some connect long after others
        assert ranks(8, do_nothing) == [1] * 8


def test_the_rank_that_failed_is_shown_and_not_the_one_that_lost_it(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed first.*no such label"):
        ranks(2, fail_on_rank_1)


def test_a_rank_that_hangs_is_named_with_its_stack(ranks: Ranks) -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 1 .*has been in start-up for 8 s.*The stack of rank 1:.*hang_on_rank_1"
    ):
        ranks(2, hang_on_rank_1, deadline_s=8)  # on a busy machine, a rank needs seconds to start


def test_a_rank_that_dies_is_named_with_its_exit_code(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 .* ended with exit code 7"):
        ranks(2, die_on_rank_1)
