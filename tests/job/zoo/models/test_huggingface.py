"""A Hugging Face configuration file describes a model; it never fetches or runs code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import JobError
from paceline.job.zoo.huggingface import from_config
from refusals import raises

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
TINY = {"model_type": "llama", **SIZES}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(TINY | changes))
    return file


@pytest.fixture(autouse=True)
def kernels_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The package `kernels` would fetch and run what a configuration names: here that is only written down."""
    import transformers.modeling_utils as modeling

    asked: list[str] = []

    def fetch(name: str, **_: object) -> None:
        asked.append(name)
        raise ImportError("this would have asked the hub")

    monkeypatch.setattr(modeling, "lazy_import_flash_attention", fetch)
    monkeypatch.setattr(modeling, "is_kernels_available", lambda: True)
    return asked


@pytest.mark.parametrize(
    "name", ["stranger/kernel", "kernels-community/flash-attn2:run", "flash_attention_4", "paged|eager", 3]
)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_attention_from_elsewhere_is_refused_before_anything_is_asked_for(
    tmp_path: Path, key: str, name: object, kernels_asked_for: list[str]
) -> None:
    with raises(JobError, "model.asks_for_code"):
        from_config(write(tmp_path, **{key: name}), "causal_lm", {})
    assert not kernels_asked_for


def test_attention_from_elsewhere_is_refused_in_the_jobs_arguments_too(
    tmp_path: Path, kernels_asked_for: list[str]
) -> None:
    with raises(JobError, "model.asks_for_code"):
        from_config(write(tmp_path), "causal_lm", {"attn_implementation": "stranger/kernel"})
    with raises(JobError, "model.asks_for_code"):
        from_config(write(tmp_path), "causal_lm", {"_attn_implementation": {"": "stranger/kernel"}})
    assert not kernels_asked_for


def test_attention_from_elsewhere_is_refused_in_a_part_of_the_configuration(tmp_path: Path) -> None:
    nested = {"model_type": "llava", "text_config": TINY | {"_attn_implementation": "stranger/kernel"}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    with raises(JobError, "model.asks_for_code"):
        from_config(tmp_path / "config.json", "causal_lm", {})


@pytest.mark.parametrize(
    "values", [{"trust_remote_code": True}, {"use_kernels": True}, {"_experts_implementation": "stranger/experts"}]
)
def test_what_would_fetch_code_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    with raises(JobError, "model.asks_for_code"):
        from_config(write(tmp_path, **values), "causal_lm", {})


def test_weights_are_not_fetched_either(tmp_path: Path) -> None:
    with raises(JobError, "model.asks_for_code"):
        from_config(write(tmp_path, use_pretrained_backbone=True), "causal_lm", {})


def test_code_that_lies_beside_a_known_architecture_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    file = write(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}, attn_implementation="eager")
    assert type(from_config(file, "causal_lm", {})).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()
