"""A rank that begins from a checkpoint reads its part of the files, and little else."""

from __future__ import annotations

import pytest

from language_models_load import LLAMA_8B, measure_loading

SMALL = {
    **LLAMA_8B,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


# a processor without instructions for bfloat16 takes minutes to measure the blocks that pp divides
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", ["fsdp=2", "tp=2", "pp=2"])
def test_a_rank_reads_only_its_share_of_a_checkpoint(plan: str) -> None:
    [found] = measure_loading(plan, ranks=[1], config=SMALL)
    assert found.read_to_share <= 1.05
