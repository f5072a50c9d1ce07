"""A quick part of PyTorch's own suite for backends passes over TCP.

All of it: `python tests/comm/shm/torch_suite.py --on gloo,tcp`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import ended, started

SUITE = Path(__file__).parents[1] / "shm" / "torch_suite.py"
QUICK = [
    "test_all_gather_coalesced_complex",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_reduce_sum_async",
    "test_all_to_all_complex",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_destroy_group",
    "test_gather_checks",
    "test_get_future",
    "test_irecv",
    "test_isend_torch_profiler",
    "test_new_subgroups_with_group_param",
    "test_reduce_group_max",
    "test_scatter_complex",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_quick_part_of_the_suite_passes(tmp_path: Path) -> None:
    with started("python", SUITE, "--on", "tcp", *QUICK, folder=tmp_path) as process:
        outcome = ended(process, 200)
    assert outcome.code == 0, outcome.out + outcome.err[-10_000:]
    assert f"tcp: {len(QUICK)} passed, 0 failed, 0 skipped" in outcome.out
