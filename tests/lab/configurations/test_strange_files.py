"""Strange files end in an error for people, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline_lab.configurations.configuration import planned
from paceline_lab.configurations.megatron import arguments
from paceline_lab.configurations.systems import read_configuration

SNIPPETS = st.sampled_from(
    [
        "--num-layers",
        "--bf16",
        "$A",
        "${A:-2}",
        "A=(",
        ")",
        "A+=(--x 1)",
        '"',
        "'",
        "\\\n",
        "#",
        "$((2*3))",
        "=",
        "8",
        "\n",
        " ",
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(SNIPPETS, max_size=30).map(" ".join)))
def test_any_text_is_a_script_with_some_arguments(text: str) -> None:
    flags, _ = arguments(text)
    assert all(isinstance(name, str) for name in flags)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[" * 5000),
        ("a.json", '{"train_batch_size": 1e400}'),
        ("a.json", '{"train_batch_size": [8], "zero_optimization": 3}'),
        ("a.yaml", "a: &a {b: *a}"),
        ("a.yaml", "distributed_type: [FSDP]\nfsdp_config: 3\nnum_processes: x"),
        ("a.toml", "[parallelism]\ntensor_parallel_degree = 0"),
        ("a.toml", "[training]\nlocal_batch_size = -1"),
        ("a.sh", "--num-layers -4 --hidden-size 0 --num-attention-heads 0 --seq-length 8 --global-batch-size 8"),
        ("a.toml", "[parallelism]\ndata_parallel_shard_degree = -3"),
        ("a.sh", "--global-batch-size 0 --micro-batch-size 0 --num-layers 2"),
    ],
)
def test_a_strange_value_is_an_error_that_says_so(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(PacelineError):
        planned(read_configuration(file), 8, "strange")
