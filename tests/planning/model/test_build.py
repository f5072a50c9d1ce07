"""Every prediction starts from a trace.

Work that it misses is never planned for, and a model that it fails on cannot be planned at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from model_families import LLAMA_70B
from paceline.errors import JobError
from paceline.job.batch import target_of
from paceline.job.job import Job
from paceline.job.loss_items import call
from paceline.job.model import Dimensions
from paceline.planning.model import model_info as tracing
from paceline.planning.model.forward_pass import batch_of, with_values
from paceline.planning.model.graph import BlockTrace, ModelTrace
from paceline.planning.model.model_info import model_info, trace, without_memory
from paceline.planning.model.tensor.degrees import prove
from paceline.planning.model.transformer import transformer
from paceline.run.dry_run.dry_run import MemoryWatch
from refusals import raises

TOKENS = {"kind": "synthetic", "shape": [16], "vocab": 120}
IMAGES = {"kind": "synthetic", "shape": [3, 32, 32], "classes": 2}
VECTORS = {"kind": "synthetic", "shape": [16]}
PAIRS = {"kind": "dataset", "factory": f"{__file__}:Sentences"}
BODY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = BODY | {"vocab_size": 120}
FAMILIES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "llama": ("causal_lm", TEXT | {"num_key_value_heads": 2}, TOKENS),
    "gpt2": ("causal_lm", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 120}, TOKENS),
    "opt": ("causal_lm", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, TOKENS),
    "mixtral": ("causal_lm", TEXT | {"num_key_value_heads": 2, "num_local_experts": 6}, TOKENS),
    "falcon": ("causal_lm", TEXT, TOKENS),
    "mamba": ("causal_lm", {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 120, "state_size": 4}, TOKENS),
    "bert": ("masked_lm", TEXT, TOKENS),
    "albert": ("masked_lm", TEXT | {"embedding_size": 16}, TOKENS),
    "bloom": ("causal_lm", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 120}, TOKENS),
    "deepseek_v3": (
        "causal_lm",
        TEXT
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        }
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1},
        TOKENS,
    ),
    "swin": (
        "image_classification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        IMAGES,
    ),
    "vit": ("image_classification", BODY | {"image_size": 32, "patch_size": 8}, IMAGES),
    "convnext": ("image_classification", {"depths": [1, 2], "hidden_sizes": [8, 16], "num_stages": 2}, IMAGES),
    "t5": (
        "seq2seq_lm",
        {"d_model": 32, "num_layers": 3, "num_heads": 4, "d_ff": 64, "d_kv": 8, "vocab_size": 120}
        | {"decoder_start_token_id": 0, "pad_token_id": 0},
        PAIRS,
    ),
}
ZOO: dict[str, tuple[dict[str, Any], Any]] = {
    "mlp": ({}, "digits"),
    "cifar_cnn": ({}, "digits"),
    "resnet50": ({"image_size": 32}, "digits"),
    "bert": ({"vocab": 120, "layers": 2}, TOKENS),
    "gpt": ({"vocab": 120, "layers": 3, "hidden": 32}, TOKENS),
    "moe": ({"vocab": 120, "layers": 2, "hidden": 32, "experts": 4}, TOKENS),
}


def job(model: Any, data: Any = VECTORS, loss: str = "cross_entropy", **more: Any) -> Job:
    return Job(model=model, data=data, loss=loss, optimizer="adamw", global_batch=8, stop={"steps": 1}, **more)


def zoo(name: str) -> Job:
    args, data = ZOO[name]
    return job({"zoo": name, "args": args}, data)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("families")

    def of(name: str) -> Job:
        task, config, data = FAMILIES[name]
        file = folder / f"{name}.json"
        file.write_text(json.dumps({"model_type": name} | config))
        return job({"hf": str(file), "task": task}, data, "model" if data is PAIRS else "cross_entropy")

    return of


def own(name: str, data: Any = VECTORS, **args: Any) -> Job:
    return job({"factory": f"{__file__}:{name}", "args": args}, data)


def counted(of: Job, samples: int = 2) -> float:
    """FLOPs of a sample as torch counts them, in a real forward pass."""
    model, batch, loss = of.model.build().train(), with_values(batch_of(of, samples)), of.loss.build()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # type: ignore[operator]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss(call(model, batch, loss=loss), target_of(batch))
    return float(counter.get_total_flops()) / samples


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "resnet50" else ()) for name in ZOO]
)
def test_a_trace_of_the_zoo_has_every_parameter_and_every_flop(name: str) -> None:
    found = trace(zoo(name))
    assert found.parameters == model_info(zoo(name).model).numel
    assert found.flops == pytest.approx(counted(zoo(name)), rel=1e-9)
    assert found.notes == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trace_of_hugging_face_models_has_every_parameter_and_every_flop(name: str, family: Any) -> None:
    found, wanted = trace(family(name)), model_info(family(name).model)
    assert found.parameters == wanted.numel
    assert sum(block.experts for block in found) == wanted.total.experts
    assert found.flops == pytest.approx(counted(family(name)), rel=1e-9)
    assert tuple(name for name in found.names if name) == wanted.blocks
    assert found.notes == ()


def kept(found: ModelTrace, number: int) -> float:
    return number * sum(block.kept_inside + block.kept_outside for block in found)


def alive(of: Job, precision: str) -> float:
    """Bytes of a sample that are still there when the loss is known, on tensors without memory.

    Without the batch itself.
    """
    after = []
    for samples in (4, 8):
        model, loss, batch = of.model.build().train(), of.loss.build(), with_values(batch_of(of, samples))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, MemoryWatch() as watch:
            given = tuple(mode.from_tensor(cast("Tensor", part)) for part in batch)
            watch.live_bytes = 0
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                total = loss(call(model, given, loss=loss), given[-1])
            after.append(watch.live_bytes)
            del total
    return float(after[1] - after[0]) / 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt", "bert", "cifar_cnn"])
def test_what_is_kept_for_the_backward_pass_is_what_a_step_holds(name: str, precision: str) -> None:
    # the first convolution keeps the image itself
    batch = 4 * 3 * 32 * 32 if name == "cifar_cnn" and precision == "fp32" else 0
    found = kept(trace(zoo(name), precision), 2 if precision == "bf16" else 4)
    assert found == pytest.approx(alive(zoo(name), precision) + batch, rel=0.01)


def test_the_casts_of_autocast_cost_the_same_for_any_number_of_samples() -> None:
    layer, plain = trace(zoo("gpt"), "bf16").blocks[1], trace(zoo("gpt")).blocks[1]
    assert layer.kept_fixed == layer.matrices  # each weight is cast once and kept
    biases = (3 + 1 + 4 + 1) * 32
    assert layer.fixed == 3 * (layer.matrices + biases)  # read in four bytes, written in two
    assert (plain.fixed, plain.kept_fixed) == (0, 0)
    assert (layer.flops, layer.parameters) == (plain.flops, plain.parameters)


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        ("gpt", {"hidden": 32}),
        ("llama", {"hidden": 32, "ffn": 64, "kv_heads": 2, "gated": True, "tied": False, "positions": False}),
    ],
)
def test_dimensions_alone_give_the_same_work(name: str, dimensions: dict[str, Any], family: Any) -> None:
    context = {"context": 16}
    real = trace(job({"zoo": "gpt", "args": ZOO["gpt"][0] | context}, TOKENS) if name == "gpt" else family(name))
    by_formula = transformer(Dimensions(layers=3, heads=4, seq=16, vocab=120, **dimensions))
    assert by_formula.parameters == real.parameters
    assert by_formula.flops == pytest.approx(real.flops, rel=1e-9)
    assert [block.matrices for block in by_formula] == [block.matrices for block in real]
    assert [block.reductions for block in by_formula] == [block.reductions for block in real]
    assert by_formula.blocks[1].kept_inside == pytest.approx(real.blocks[1].kept_inside, rel=0.3)


def test_blocks_stand_in_the_order_in_which_data_passes_them(family: Any) -> None:
    found = trace(family("t5"))
    assert [name.split(".")[0] for name in found.names] == [
        "",
        "encoder",
        "encoder",
        "encoder",
        "",
        "decoder",
        "decoder",
        "decoder",
        "",
    ]
    assert [block.kind.split()[0] for block in found] == [
        "embedding",
        *["layer"] * 3,
        "between",
        *["layer"] * 3,
        "head",
    ]
    assert found.blocks[2] is found.blocks[3]  # the first of a stack has a table of positions besides
    assert found.blocks[1] != found.blocks[2]
    assert found.blocks[1].boundary == 16 * 32
    assert found.tokens == 16


def test_work_between_single_layers_is_not_lost() -> None:
    found = trace(zoo("cifar_cnn"))
    assert found.names == ("0", "", "3", "", "7", "", "9", "")
    assert [block.boundary for block in found][::2] == [16 * 32 * 32, 32 * 16 * 16, 128, 10]
    convolution = found.blocks[0].gemms[0]
    assert (convolution.rows, convolution.n, convolution.k, convolution.read) == (32 * 32, 16, 27, 3 * 32 * 32)
    assert convolution.taps == 9
    assert found.tokens == 1


def divided(block: BlockTrace) -> list[str]:
    return [gemm.divided for gemm in block.gemms for _ in range(gemm.times)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert", "vit"])
def test_attention_and_feed_forward_are_divided_in_pairs(name: str, family: Any) -> None:
    layer = trace(family(name)).blocks[1]
    assert "none" not in divided(layer)
    assert layer.reductions == 2
    assert divided(layer).count("k") == divided(layer).count("batch") == 2
    assert layer.matrices == sum(gemm.n * gemm.k * gemm.times for gemm in layer.gemms if not gemm.batch)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "mixtral",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "swin", "bloom", "deepseek_v3")),
    ],
)
def test_what_is_divided_is_what_the_split_proves(name: str, family: Any) -> None:
    """Pairs alone: what is divided without a partner, such as heads, is divided elsewhere."""
    of = family(name)
    loss, model = of.loss.build(), without_memory(of.model).train()
    proof = prove(model, 2, batch_of(of, 2), lambda model, batch: call(model, batch, loss=loss))
    weights = [
        model.get_parameter(f"{path}.weight") for region in proof.regions for path in {*region.columns, *region.rows}
    ]
    found = [
        gemm
        for block in trace(of)
        for gemm in block.gemms
        if gemm.divided in ("n", "k") and gemm.n != TEXT["vocab_size"]
    ]
    assert sum(gemm.n * gemm.k * gemm.times for gemm in found) == sum(weight.numel() for weight in weights) > 0


def test_mixtures_stay_whole_and_take_their_tokens_in_turn(family: Any) -> None:
    layer = trace(family("mixtral")).blocks[1]
    experts = {(gemm.n, gemm.k): gemm for gemm in layer.gemms if gemm.experts}
    assert {gemm.experts for gemm in experts.values()} == {6}
    assert {gemm.rows for gemm in experts.values()} == {2 * 16}  # two experts for each token
    assert {gemm.divided for gemm in experts.values()} == {"none"}
    assert layer.experts == 6 * 3 * 32 * 64
    assert layer.routed == 2 * 16 * 32
    assert layer.reductions == 1  # that of attention


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("NormBetween", "a norm needs the whole row between the two matrices"),
        ("LeaksBetween", "the result of the first is needed whole elsewhere"),
    ],
)
def test_pairs_that_are_none_stay_whole(factory: str, reason: str) -> None:
    found = trace(own(factory))
    assert not any("k" in divided(block) for block in found), reason
    assert sum(block.matrices for block in found) == 0, reason
    assert sum(block.reductions for block in found) == 0, reason


def test_torchs_own_attention_stays_whole() -> None:
    layer = trace(own("Torchs", TOKENS)).blocks[1]
    whole = [gemm for gemm in layer.gemms if gemm.divided == "none"]
    assert {(gemm.n, gemm.k) for gemm in whole if not gemm.batch} == {(96, 32), (32, 32)}
    assert (layer.matrices, layer.reductions) == (2 * 32 * 64, 1)
    assert layer.kept_scores > 0  # what it would keep if it were not fused


def test_what_lies_before_all_training_has_no_backward_pass() -> None:
    found = trace(own("Frozen"))
    assert [block.trained for block in found if block.parameters] == [False, False, True]


def test_only_the_first_layer_reads_data_that_needs_no_gradient() -> None:
    of_data = [[gemm.data for gemm in block.gemms] for block in trace(zoo("cifar_cnn"), "fp32").blocks]
    assert sum(map(sum, of_data)) == 1
    assert of_data[0][0]
    assert not any(gemm.data for block in trace(zoo("gpt"), "fp32").blocks for gemm in block.gemms)


def test_a_model_whose_code_reads_values_is_traced_on_invented_samples() -> None:
    found = trace(own("ReadsValues"))
    assert found.parameters == 4 * (16 * 16 + 16)
    assert found.flops == 4 * 2 * 16 * 16
    assert found.notes == ()
    assert trace(own("WritesNumpy")).flops == 2 * 16 * 10


def test_a_large_one_is_estimated_by_its_parameters_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_REAL", 1)
    found = trace(own("ReadsValues", width=32, data={"kind": "synthetic", "shape": [32]}))
    assert found.parameters == 4 * (32 * 32 + 32)
    assert found.flops == 2 * 4 * 32 * 32
    assert len(found.blocks) == 4
    assert "cannot be traced without the values of tensors" in found.notes[0]
    assert "Measured blocks replace these estimates" in found.notes[0]


def test_a_question_with_no_answer_is_said() -> None:
    assert "Asks: reads values of tensors" in trace(own("Asks")).notes[0]


@pytest.mark.parametrize(
    ("factory", "code"),
    [
        (
            "Wrong",
            "model.forward_failed",
        ),
        ("Raises", "model.forward_failed"),
    ],
)
def test_an_error_in_the_models_code_names_the_module(factory: str, code: str) -> None:
    with raises(JobError, code):
        trace(own(factory))


def test_a_model_is_traced_once_and_leaves_torch_as_it_was() -> None:
    state, attention, autocast = (
        torch.get_rng_state(),
        torch.nn.functional.scaled_dot_product_attention,
        torch.autocast.__init__,
    )
    first = trace(zoo("moe"))
    assert trace(zoo("moe").model_copy(update={"global_batch": 16, "seed": 3})) is first
    assert trace(zoo("moe"), "bf16") is not first
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.nn.functional.scaled_dot_product_attention is attention
    assert torch.autocast.__init__ is autocast


@pytest.mark.slow
def test_seventy_billion_parameters_are_traced_without_memory() -> None:
    large = Job.load(Path(__file__).parents[3] / "examples/large/llama_70b.yaml")
    by_formula = transformer(LLAMA_70B)
    found = trace(large)
    assert (found.parameters, found.flops) == (by_formula.parameters, by_formula.flops)
    assert [often for _, often in found.runs] == [1, 80, 1]


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.zeros(16, dtype=torch.int64), "labels": torch.zeros(8, dtype=torch.int64)}


class FrameworkProfile(nn.Module):
    """Two blocks between two linear layers; subclasses do something odd in between."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, width)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.between(block(x))
        return cast("Tensor", self.last(x))


class ReadsValues(FrameworkProfile):
    def between(self, x: Tensor) -> Tensor:
        return x[x.sum(1).abs() >= 0]


class Asks(FrameworkProfile):
    def between(self, x: Tensor) -> Tensor:
        return x if x.norm().item() < 100 else x / x.norm()


class WritesNumpy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 10)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(torch.from_numpy(input.numpy() * 2))


class NormBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.down(self.norm(self.up(x))))


class LeaksBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        between = self.up(x)
        return cast("Tensor", self.down(between.relu()) + between)


class Torchs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(120, 32)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 2)
        self.head = nn.Linear(32, 120)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.layers(self.tokens(x))))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(2))
        for parameter in (*self.stem.parameters(), *self.blocks[0].parameters()):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(17, 10)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.second(self.first(x)))


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such mode")


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(16, 10), Raising()

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.inner(self.linear(x)))
