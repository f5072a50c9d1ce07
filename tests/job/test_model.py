"""Models. A model that is built wrongly, or is not a model, must be found before ranks are started."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import DataError, JobError
from paceline.job.loss import LossSpec, build_metrics
from paceline.job.model import ModelSpec
from paceline.job.zoo.huggingface import _uniform, random_view
from refusals import raises

SMALL_GPT = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 20, "context": 16}
SMALL_GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "vocab_size": 20,
    "n_positions": 16,
    "dtype": "bfloat16",
}


def spec(zoo: str | None = None, **values: Any) -> ModelSpec:
    return ModelSpec.model_validate(values | ({"zoo": zoo} if zoo else {}))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def logits(output: Any) -> Tensor:
    result: Tensor = output if isinstance(output, Tensor) else output.logits
    return result


@pytest.mark.parametrize(
    ("name", "args", "count", "shape"),
    [
        ("mlp", {}, 784 * 1024 + 1024 + 1024 * 10 + 10, (1, 28, 28)),
        ("cifar_cnn", {}, 268_650, (3, 32, 32)),
        ("resnet50", {}, 25_557_032, (3, 224, 224)),
        ("resnet50", {"image_size": 64, "classes": 10}, 23_528_522, (3, 64, 64)),
    ],
)
def test_an_image_model_has_its_papers_size_and_fits_the_images_it_asks_for(
    name: str, args: dict[str, Any], count: int, shape: tuple[int, ...]
) -> None:
    model_spec = spec(name, args=args)
    model = model_spec.build()
    assert parameters(model) == count
    assert model_spec.input_shape() == shape
    assert logits(model(torch.randn(2, *shape))).shape == (2, args.get("classes", 1000 if name == "resnet50" else 10))


def test_the_seed_decides_the_weights() -> None:
    def build(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(spec("gpt", args=SMALL_GPT).build().parameters())

    assert all(torch.equal(a, b) for a, b in zip(build(1), build(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(build(1), build(2), strict=True))


def test_the_gpt_sees_no_token_before_its_time() -> None:
    model = spec("gpt", args=SMALL_GPT).build().eval()
    tokens = torch.randint(0, 20, (3, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 20
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 16, 20)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


def test_the_gpts_attention_is_what_the_formula_says() -> None:
    model: Any = spec("gpt", args=SMALL_GPT).build().eval().double()
    attention = model.blocks[0].attention
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    query, key, value = attention.query_key_value(x).chunk(3, dim=-1)
    heads = []
    for part in (slice(0, 16), slice(16, 32)):
        scores = query[..., part] @ key[..., part].transpose(1, 2) / 4
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(dim=-1) @ value[..., part])
    assert torch.allclose(attention(x), attention.out(torch.cat(heads, dim=-1)))


def test_the_gpt_is_small_by_default_and_shares_its_embedding_with_its_head() -> None:
    model: Any = spec("gpt").build()
    assert 3_200_000 < parameters(model) < 3_300_000
    assert model.head.weight is model.tokens.weight
    assert isinstance(model.blocks, nn.ModuleList)
    tokens, following = torch.randint(0, 256, (4, 128)), torch.randint(0, 256, (512,))
    assert F.cross_entropy(model(tokens).flatten(0, 1), following).item() < 6.0  # a sound initialisation is near ln 256


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    model = spec("gpt", args=SMALL_GPT).build()
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 20)
    with raises(DataError, "model.context_exceeded", length=17, context=16):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_bert_restores_bytes_and_trains_every_one_of_them() -> None:
    args = {"layers": 1, "hidden": 32, "heads": 2, "context": 16}
    model = spec("bert", args=args).build()
    output = model(torch.zeros(2, 16, dtype=torch.int64))
    assert logits(output).shape == (2, 16, 257)
    LossSpec(name="cross_entropy").build()(output, torch.zeros(2, 16, dtype=torch.int64)).backward()
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    assert embedding.weight.grad[0].any()  # transformers pads with token 0 unless told otherwise
    assert spec("bert", args=args).input_shape() is None


def test_simclr_makes_two_views_of_length_1_and_can_be_trained_on_them() -> None:
    torch.manual_seed(0)
    model_spec = spec("simclr", args={"dim": 24})
    model = model_spec.build()
    assert model_spec.input_shape() == (3, 32, 32)
    # patches of colour; in noise no view is like another
    images = F.interpolate(torch.rand(16, 3, 4, 4), (32, 32), mode="bilinear")
    contrastive = LossSpec(name="contrastive").build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        output = model(images)
        losses.append(contrastive(output, None))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert output.shape == (16, 2, 24)
    assert torch.allclose(output.norm(dim=-1), torch.ones(16, 2), atol=1e-5)
    assert losses[-1] < losses[0] - 0.2
    assert model.eval()(images).shape == (16, 2, 24)
    (found,) = build_metrics(("contrastive_accuracy",))
    assert found(output, None)[1] == 32


def test_simclr_takes_resnet50_as_its_encoder() -> None:
    model_spec = spec("simclr", args={"encoder": "resnet50", "image_size": 32})
    assert model_spec.input_shape() == (3, 32, 32)
    assert spec("simclr", args={"encoder": "resnet50"}).input_shape() == (3, 224, 224)
    assert model_spec.build()(torch.rand(2, 3, 32, 32)).shape == (2, 2, 128)


def test_a_view_stays_within_its_own_image() -> None:
    torch.manual_seed(0)
    images = torch.stack([torch.full((3, 8, 8), float(i)) for i in range(4)])
    view = random_view(images, torch.tensor(1), 0)
    assert torch.allclose(view, images, atol=1e-5)  # whatever is cut out of one colour is that colour
    picture = torch.rand(1, 3, 32, 32)
    views = [random_view(picture, torch.tensor(step), number) for step in range(4) for number in (0, 1)]
    assert views[0].shape == picture.shape
    assert not any(torch.allclose(views[i], views[j]) for i in range(8) for j in range(i))


@pytest.mark.parametrize(
    ("name", "args", "code", "fields"),
    [
        ("gtp", {}, "model.unknown", {"name": "gtp", "hint": re.compile('"gpt"')}),
        (
            "meta-llama/Llama-3.1-8B",
            {},
            "model.unknown",
            {"hint": re.compile(r"\{transformer: \{name: llama-3\.1-8b\}\}")},
        ),
        ("gpt", {"layer": 3}, "job.unknown_argument", {"argument": "layer", "hint": re.compile('"layers"')}),
        ("gpt", {"layer": 3, "hidden": "wide"}, "file.wrong_type", {"key": re.compile("hidden"), "value": "'wide'"}),
        ("gpt", {"hidden": 30, "heads": 4}, "model.hidden_not_multiple", {"hidden": 30, "heads": 4, "fitting": 32}),
        ("bert", {"hidden": 30, "heads": 4}, "model.hidden_not_multiple", {"hidden": 30, "heads": 4, "fitting": 32}),
        ("gpt", {"dropout": 1}, "file.value_out_of_range", {"key": re.compile("dropout"), "value": 1}),
        ("mlp", {"hidden": 0}, "file.value_out_of_range", {"key": re.compile("hidden"), "value": 0}),
        (
            "simclr",
            {"encoder": "resnet"},
            "file.choice_unknown",
            {"choices": ["cifar_cnn", "resnet50"], "hint": re.compile('"resnet50"')},
        ),
        ("simclr", {"image_size": 64}, "model.image_size", {"image_size": 64}),
    ],
)
def test_a_zoo_model_that_cannot_be_built_says_what_would_do(
    name: str, args: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises(JobError, code, **fields):
        spec(name, args=args).build()


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    file = tmp_path / "own_models.py"
    file.write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width: int, depth: int = 1) -> None:\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(width, depth)\n"
        "def make(width): return Net(width, depth=2)\n"
        "def forgot(): Net(1)\n"
        "def uncalled(): return Net\n"
        "def text(): return 'net'\n"
        "built = Net(1)\n"
    )
    return file


@pytest.mark.parametrize("name", ["Net", "make"])
def test_a_class_or_a_function_of_ones_own_makes_the_model(own_code: Path, name: str) -> None:
    model: Any = spec(factory=f"{own_code}:{name}", args={"width": 5}).build()
    assert model.layer.weight.shape == (2 if name == "make" else 1, 5)
    assert spec(factory=f"{own_code}:{name}").input_shape() is None


@pytest.mark.parametrize(
    ("name", "args", "code", "fields"),
    [
        ("Net", {}, "job.args_do_not_fit", {"signature": "(width: int, depth: int = 1) -> None", "args": "none"}),
        ("make", {"widht": 1}, "job.args_do_not_fit", {"signature": "(width)", "args": "widht"}),
        ("forgot", {}, "model.not_a_module", {"found": re.compile("^None")}),
        ("uncalled", {}, "model.not_a_module", {"found": re.compile("class Net")}),
        ("text", {}, "model.not_a_module", {"found": re.compile(r"builtins\.str")}),
        ("built", {}, "model.not_a_factory", {"class_name": "Net"}),
        ("nett", {}, "job.object_missing", {"name": "nett", "hint": re.compile('"Net"')}),
    ],
)
def test_a_factory_that_makes_no_model_is_named_with_the_reason(
    own_code: Path, name: str, args: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with raises(JobError, code, path=f"{own_code}:{name}", **fields):
        spec(factory=f"{own_code}:{name}", args=args).build()


def config(tmp_path: Path, **values: Any) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    return file


def test_a_hugging_face_config_becomes_a_model_in_full_precision(tmp_path: Path) -> None:
    model = spec(hf=config(tmp_path, **SMALL_GPT2), task="causal_lm").build()
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert logits(model(torch.zeros(1, 4, dtype=torch.int64))).shape == (1, 4, 20)


@pytest.mark.parametrize("key", ["n_layer", "num_hidden_layers"])
def test_args_override_the_config_under_any_of_a_keys_names(tmp_path: Path, key: str) -> None:
    model: Any = spec(hf=config(tmp_path, **SMALL_GPT2), task="causal_lm", args={key: 3}).build()
    assert len(model.transformer.h) == 3


def test_a_config_that_names_no_class_gets_the_first_where_its_kind_has_several(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deit", **sizes}))
    model = spec(hf=tmp_path / "config.json", task="image_classification").build()
    assert type(model).__name__ == "DeiTForImageClassification"


def test_the_number_of_classes_can_be_overridden(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        model_type="vit",
        image_size=[16, 24],
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_channels=1,
        id2label={"0": "a", "1": "b", "2": "c"},
    )
    assert spec(hf=file, task="image_classification").input_shape() == (1, 16, 24)
    model_spec = spec(hf=file, task="image_classification", args={"image_size": 32, "num_labels": 5})
    assert model_spec.input_shape() == (1, 32, 32)
    assert logits(model_spec.build()(torch.rand(2, 1, 32, 32))).shape == (2, 5)


@pytest.mark.parametrize(
    ("values", "args", "task", "code", "fields"),
    [
        (
            SMALL_GPT2,
            {"n_layers": 3},
            "causal_lm",
            "model.configuration_key_unknown",
            {"problems": re.compile('"n_layers".*"n_layer"')},
        ),
        (
            SMALL_GPT2,
            {"n_layer": "three"},
            "causal_lm",
            "model.configuration_refused",
            {"error": re.compile("expected int, got str")},
        ),
        (
            SMALL_GPT2,
            {},
            "image_classification",
            "model.task_unsupported",
            {"model_type": "gpt2", "task": "image_classification", "fitting": re.compile("^causal_lm, sequence_class")},
        ),
        ({"n_layer": 3}, {}, "causal_lm", "model.no_model_type", {}),
        ({"model_type": "gpt9000"}, {}, "causal_lm", "model.type_unknown", {"model_type": "gpt9000"}),
    ],
)
def test_a_config_that_does_not_fit_is_named_with_the_reason(
    tmp_path: Path, values: dict[str, Any], args: dict[str, Any], task: str, code: str, fields: dict[str, Any]
) -> None:
    with raises(JobError, code, **fields):
        spec(hf=config(tmp_path, **values), task=task, args=args).build()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "model.configuration_not_json"),
        (b"\xff", "model.configuration_not_json"),
        (b"[1]", "model.configuration_invalid"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: bytes, code: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with raises(JobError, code):
        spec(hf=file, task="causal_lm").build()


def test_without_transformers_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # what Python does where it is not installed
    with raises(JobError, "model.transformers_missing"):
        spec("bert").build()


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({}, "model.source_ambiguous"),
        ({"zoo": "mlp", "factory": "a:b"}, "model.source_ambiguous"),
        ({"hf": __file__}, "model.task_missing"),
        ({"hf": "meta-llama/Llama-3.1-8B"}, "model.on_the_hub"),
        ({"hf": "https://huggingface.co/meta-llama/Llama-3.1-8B/tree/main"}, "model.on_the_hub"),
        ({"zoo": "mlp", "weights": "meta-llama/Llama-3.1-8B"}, "model.on_the_hub"),
        ({"hf": "missing/config.json"}, "model.file_missing"),
        ({"zoo": "mlp", "task": "causal_lm"}, "model.only_with_hf"),
        ({"zoo": "mlp", "dtype": "bf16"}, "model.only_with_hf"),
    ],
)
def test_a_model_has_exactly_one_source_that_is_at_hand(values: dict[str, Any], code: str) -> None:
    with raises(ValueError, code):
        spec(**values)


@pytest.mark.parametrize("args", [{}, {"width": 3}])
def test_an_import_path_may_stand_in_the_place_of_a_zoo_name(args: dict[str, Any]) -> None:
    assert ModelSpec.model_validate("pkg.mod:make") == ModelSpec(factory="pkg.mod:make")
    assert spec(zoo="pkg.mod:make", args=args) == ModelSpec(factory="pkg.mod:make", args=args)


def test_the_views_of_an_image_do_not_depend_on_the_rest_of_the_batch() -> None:
    torch.manual_seed(0)
    images = torch.rand(6, 3, 32, 32)
    model = spec("simclr", args={"dim": 24}).build()
    whole = [model(images), model(images)]  # two training steps
    model.load_state_dict(model.state_dict() | {"steps": torch.tensor(0)})
    parts = [model(images[2:4].to(memory_format=torch.channels_last)) for _ in range(2)]
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one[2:4], other, atol=1e-6)
    assert not torch.allclose(whole[0], whole[1], atol=1e-2)  # other views in every step
    assert not torch.allclose(whole[0][:, 0], whole[0][:, 1], atol=1e-2)  # and two of them
    evaluated = model.eval()(images)
    assert torch.equal(evaluated, model(images))
    assert not torch.allclose(evaluated, whole[0], atol=1e-2)


def test_the_numbers_drawn_for_views_are_uniform_and_apart() -> None:
    torch.manual_seed(0)
    images = torch.rand(2000, 1, 4, 4)
    one_image = torch.cat([_uniform(images[:1], torch.tensor(key)) for key in range(2000)])
    for drawn in (_uniform(images, torch.tensor(7)), one_image):
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert (drawn.mean(0) - 0.5).abs().max() < 0.03  # 4.6 standard errors
        assert (drawn.var(0) * 12 - 1).abs().max() < 0.1
        assert torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max() < 0.12
