"""PyTorch's own suite passes on our process group wherever it passes on gloo.

Code that runs on gloo runs on ours unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import ended, started

SUITE = Path(__file__).with_name("torch_suite.py")
CANNOT_PASS = 6  # by name and reason in `torch_suite.CANNOT_PASS`; the suite's exit code says whether it is those
QUICK = [
    "test_all_gather_coalesced_complex",
    "test_all_gather_group",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_group_product",
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_to_all_complex",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_broadcast_group",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_ddp_create_graph",
    "test_destroy_group",
    "test_gather",
    "test_gather_checks",
    "test_gather_object_subgroup",
    "test_get_future",
    "test_irecv",
    "test_isend_torch_profiler",
    "test_new_subgroups_with_group_param",
    "test_reduce_group_max",
    "test_reduce_sum_twice",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_quick_part_of_the_suite_passes(tmp_path: Path, backend: str) -> None:
    """All of it over TCP: `python tests/comm/shm/torch_suite.py --on gloo,tcp`."""
    outcomes = run_suite("--on", backend, *QUICK, folder=tmp_path, deadline_s=200)
    assert {name: by[backend]["why"] for name, by in outcomes.items() if by[backend]["how"] != "passed"} == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_passes_on_gloo_passes_on_ours(tmp_path: Path) -> None:
    outcomes = run_suite(folder=tmp_path, deadline_s=1700)
    on_gloo = {name for name, by in outcomes.items() if by["gloo"]["how"] == "passed"}
    on_ours = {name for name, by in outcomes.items() if by["shm"]["how"] == "passed"}
    assert len(on_gloo) > 120
    assert len(on_gloo - on_ours) == CANNOT_PASS


def run_suite(*arguments: str, folder: Path, deadline_s: float) -> Any:
    """How each test ended, by name and backend."""
    results = folder / "results.json"
    with started("python", SUITE, "--json", results, *arguments, folder=folder) as process:
        outcome = ended(process, deadline_s)
    assert outcome.code == 0, outcome.out + outcome.err[-10_000:]
    return json.loads(results.read_text())
