"""Known models: as large as their makers say, and found under the names that tables of measurements use."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.known import KnownModel
from paceline.job.known.names import find_model, models
from paceline.job.model import Dimensions
from paceline.planning.model.build import trace
from paceline.planning.model.known import IMAGE_MODELS, known_dimensions, known_model
from paceline.planning.model.transformer import active_parameters, transformer


def counted(model: KnownModel) -> Dimensions:
    """Dimensions without layers that predict further tokens, which makers do not count."""
    return Dimensions.model_validate({**model.dimensions, "mtp": 0})


@pytest.mark.parametrize("model", models(), ids=lambda model: model.name)
def test_a_known_model_has_the_parameters_that_its_makers_print(model: KnownModel) -> None:
    if model.parameters is None:
        return
    found = transformer(counted(model)).parameters / 1e9
    printed_to = 0.05 if model.parameters > 1.5 else 0.0  # such as "1.7 billion"
    assert found == pytest.approx(model.parameters, rel=0.01, abs=printed_to)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 37),  # arXiv:2412.19437, abstract
        ("deepseek-v2", 21),  # arXiv:2405.04434, abstract
        ("kimi-k2", 32.6),  # arXiv:2507.20534, table 2
        ("qwen3-235b-a22b", 22),
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39),
        ("nemotron-3-nano", 3.6),
        ("dbrx", 36),
        ("llama-4-scout", 17),
        ("llama-4-maverick", 17),
        ("olmoe-1b-7b", 1.3),
    ],
)
def test_a_token_meets_the_parameters_that_a_mixture_is_known_for(name: str, billions: float) -> None:
    model = find_model(name)
    assert model is not None
    assert active_parameters(counted(model)) / 1e9 == pytest.approx(billions, rel=0.035)


def test_no_two_models_have_one_name() -> None:
    names = [name for model in models() for name in (model.name, *model.also)]
    assert len(names) == len(set(names))
    for model in models():
        for name in (model.name, *model.also):
            assert find_model(name) == model, name


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("LLAMA3.1_405B", "llama-3.1-405b"),
        ("Llama-3.1 405B", "llama-3.1-405b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Meta-Llama-3-70B", "llama-3-70b"),
        ("Llama 2 7B", "llama-2-7b"),
        ("Llama4-Scout-17B-16E-Maxtext", "llama-4-scout"),
        ("Qwen3_235B_a22B (tokendrop)", "qwen3-235b-a22b"),
        ("DeepSeek3-671B-MaxText", "deepseek-v3"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("Nemotron_3_Nano", "nemotron-3-nano"),
        ("Nemotron_3_Ultra", "nemotron-3-ultra"),
        ("Mixtral-8x22B-MaxText", "mixtral-8x22b"),
        ("GPT-3 175B (MLPerf)", "gpt-3-175b"),
        ("Turing-530B", "megatron-530b"),
        ("MPT-7b", "mpt-7b"),
        ("BERT-Large", "bert-large"),
        ("gemma4-4b", "gemma-4-e4b"),
        ("google/flan-t5-xxl", "t5-v1.1-xxl"),
        ("gpt/gpt3_15b_8t_release_sm_gb200", "nemotron-4-15b"),
        ("mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release", "mixtral-8x7b"),
        ("mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release", "deepseek-v3-proxy"),
        ("nemotron/nemotron3_5_lightning_nightly_tp1_pp1_cp1_ep8_dgx_gb200", "nemotron-3.5-lightning"),
        ("t5/t5_11b_mcore_tp4_pp1", "t5-11b-mcore"),
    ],
)
def test_spellings_of_published_tables_are_understood(name: str, known: str) -> None:
    found = find_model(name)
    assert found is not None
    assert found.name == known


@pytest.mark.parametrize(
    "name", ["llama-3.1-9b", "GPT 200B", "BERT L24 h1024", "llama-3.1-8b-wider", "grok1_proxy", "8b", "", "gpt"]
)
def test_another_model_is_not_taken_for_a_known_one(name: str) -> None:
    assert find_model(name) is None
    assert known_model(name) is None
    assert known_dimensions(name) is None


def test_a_name_can_say_that_no_further_tokens_are_predicted() -> None:
    with_them, without = known_dimensions("DeepSeekV3"), known_dimensions("DeepSeekV3 (w/o MTP)")
    assert with_them is not None
    assert without is not None
    assert (with_them.mtp, without.mtp) == (1, 0)


def test_a_known_model_is_traced_at_another_length() -> None:
    found = known_model("llama-3.1-8b", seq=65536, vocab=128512)
    assert found is not None
    assert found.tokens == 65536
    assert found.blocks[0].matrices == 128512 * 4096


def job(**transformer: object) -> Job:
    return Job(
        model={"transformer": transformer},
        data="synthetic",
        loss="cross_entropy",
        optimizer="adamw",
        global_batch=64,
        stop={"steps": 10},
    )


def test_a_job_names_a_model_and_gives_what_is_different() -> None:
    found = trace(job(name="llama-3.1-8b", seq=4096, layers=16))
    assert (found.tokens, len(found.blocks)) == (4096, 18)
    spec = job(name="llama-3.1-8b").model.transformer
    assert spec == Dimensions.model_validate(spec.model_dump() if spec else {})


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        JobError, match=r'no dimensions of a model "lama-3.1-8b" are known. Did you mean "llama-3.1-8b"'
    ):
        job(name="lama-3.1-8b", seq=4096)


DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"


def row(family: str) -> str:
    """As docs/models.md has it."""
    own = [model for model in models() if model.family == family]
    sources = "; ".join(dict.fromkeys(part for model in own for part in model.source.split("; ")))
    return f"| {family} | {', '.join(f'`{model.name}`' for model in own)} | {sources} |"


def test_the_page_of_known_models_is_that_of_the_catalogue() -> None:
    rows = "\n".join(row(family) for family in sorted({model.family for model in models()}))
    assert rows in DOCUMENT.read_text(), f"docs/models.md is behind; its rows are\n{rows}"


def image_row(source: str) -> str:
    own = [model.name for model in IMAGE_MODELS if model.source == source]
    return f"| {', '.join(f'`{name}`' for name in own)} | {source} |"


def test_the_page_of_known_models_has_the_image_models() -> None:
    rows = "\n".join(image_row(source) for source in dict.fromkeys(model.source for model in IMAGE_MODELS))
    assert rows in DOCUMENT.read_text(), f"docs/models.md is behind; its rows are\n{rows}"
