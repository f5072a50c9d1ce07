"""Known models: as large as their makers say, and found under the names that tables of measurements use."""

from __future__ import annotations

from math import prod

import pytest

from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.known import KnownModel, find_model, models
from paceline.job.model import Dimensions
from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.image_classifiers import ImageBuilder
from paceline.planning.model.known import (
    IMAGE_MODELS,
    LatentUNet,
    find_image_model,
    known_dimensions,
    known_model,
    latent_unet,
)
from paceline.planning.model.model_info import trace
from paceline.planning.model.transformer import active_parameters, transformer
from refusals import raises


def counted(model: KnownModel) -> Dimensions:
    """Dimensions without layers that predict further tokens, which makers do not count."""
    return Dimensions.model_validate({**model.dimensions, "mtp": 0})


def test_known_models_have_the_parameters_that_their_makers_print() -> None:
    for model in models():
        if model.parameters is not None:
            found = transformer(counted(model)).parameters / 1e9
            printed_to = 0.05 if model.parameters > 1.5 else 0.0  # such as "1.7 billion"
            assert found == pytest.approx(model.parameters, rel=0.01, abs=printed_to), model.name


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
    with raises(JobError, "model.dimensions_unknown", name="lama-3.1-8b"):
        job(name="lama-3.1-8b", seq=4096)


def built(name: str) -> ModelTrace:
    found = known_model(name)
    assert found is not None
    return found


def test_image_models_have_the_parameters_and_products_that_are_printed() -> None:
    for model in IMAGE_MODELS:
        trace = model.build()
        if model.parameters is not None:
            assert trace.parameters / 1e6 == pytest.approx(model.parameters, rel=0.01), model.name
        if model.gmacs is not None:
            assert trace.flops / 2e9 == pytest.approx(model.gmacs, rel=0.01), model.name


def test_the_u_nets_are_those_of_their_code() -> None:
    # model/unet.py of UNet_Industrial prints 1,824,945 for its small form, from another version of its blocks
    assert built("UNet_Industrial").parameters == pytest.approx(1_824_945, rel=0.02)
    medical = built("UNet_Medical")
    assert medical.blocks[-1].gemms[-1].rows == 388 * 388
    # 31.03 million with transposed convolutions of 2 × 2; NVIDIA's are of 3 × 3
    assert medical.parameters - 5 * sum(2 * n * n for n in (64, 128, 256, 512)) == pytest.approx(31.03e6, rel=1e-3)


def test_ssd_has_as_many_boxes_as_its_paper() -> None:
    heads = built("SSD").blocks[-1].gemms
    assert sum(gemm.rows * gemm.n for gemm in heads) == 8732 * (81 + 4)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ResNet-50 v1.5", "resnet-50"),
        ("resnet50v1.5", "resnet-50"),
        ("resnext101-32x4d", "resnext-101-32x4d"),
        ("se-resnext101-32x4d", "se-resnext-101-32x4d"),
        ("SSD", "ssd300"),
        ("UNet_3D_Medical", "unet-3d-medical"),
        ("ViT-B/16", "vit-b/16"),
        ("google/vit-base-patch16-224", "vit-b/16"),
        ("wan2.1-14b", "wan-2.1-14b"),
        ("Stable Diffusion v2", "stable-diffusion-2"),
        ("SDXL", "stable-diffusion-xl"),
    ],
)
def test_image_models_are_found_in_the_spellings_of_tables(name: str, known: str) -> None:
    found = find_image_model(name)
    assert found is not None
    assert found.name == known


def test_an_unknown_image_model_is_none() -> None:
    assert known_model("resnet-51") is None


def test_a_grouped_convolution_is_as_many_products_that_read_a_part_each() -> None:
    block = ImageBuilder(64, (28, 28)).convolution(64, groups=64).close().trace().blocks[0]
    gemm = block.gemms[0]
    assert (gemm.rows, gemm.n, gemm.k, gemm.times, gemm.read) == (784, 1, 9, 64, 784)
    assert block.matrices == 64 * 9


def test_norms_and_activations_are_counted_as_traffic_and_what_they_keep() -> None:
    plain = ImageBuilder(8, (16, 16)).convolution(8, norm=False, activation=False).close().trace().blocks[0]
    whole = ImageBuilder(8, (16, 16)).convolution(8).close().trace().blocks[0]
    elements = 8 * prod((16, 16))
    assert (
        whole.outside - plain.outside == 5 * elements
    )  # a norm reads twice and writes, an activation reads and writes
    assert whole.kept_outside - plain.kept_outside == elements


def test_equal_blocks_of_a_network_are_one_object() -> None:
    trace = built("resnet-50")
    assert len({id(block) for block in trace}) < len(trace.blocks) - 5
    assert [block.kind for block in trace] == ["embedding", *["layer"] * 16, "head"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("sd-1.5", 859_520_964), ("sd-2.1", 865_910_724), ("sdxl", 2_567_463_684)],  # of the published checkpoints
)
def test_the_u_nets_of_latent_diffusion_have_every_parameter(name: str, parameters: int) -> None:
    assert built(name).parameters == parameters


def test_attention_of_a_u_net_grows_with_the_square_of_its_places() -> None:
    small, large = latent_unet(shape := LatentUNet((64,), (1,), 1, 32, 16)), latent_unet(shape._replace(side=32))
    squares = [sum(gemm.flops for block in net for gemm in block.gemms if gemm.batch) for net in (small, large)]
    assert squares[1] > 12 * squares[0]
    assert large.blocks[1].kept_scores > 12 * small.blocks[1].kept_scores
