"""Image models by their shapes: as large and as much work as is printed of them, and bound by what they move."""

from __future__ import annotations

from math import prod

import pytest

from paceline.planning.model.graph import ModelTrace
from paceline.planning.model.image_classifiers import ImageBuilder
from paceline.planning.model.known import (
    IMAGE_MODELS,
    KnownImageModel,
    LatentUNet,
    find_image_model,
    known_model,
    latent_unet,
)


def built(name: str) -> ModelTrace:
    found = known_model(name)
    assert found is not None
    return found


@pytest.mark.parametrize("model", IMAGE_MODELS, ids=lambda model: model.name)
def test_an_image_model_has_the_parameters_and_products_that_are_printed(model: KnownImageModel) -> None:
    trace = model.build()
    if model.parameters is not None:
        assert trace.parameters / 1e6 == pytest.approx(model.parameters, rel=0.01)
    if model.gmacs is not None:
        assert trace.flops / 2e9 == pytest.approx(model.gmacs, rel=0.01)


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
