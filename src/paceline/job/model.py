"""The model of a job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from paceline.errors import InvalidValue, JobError
from paceline.job.adapter import AdapterSpec
from paceline.job.data import DataPath
from paceline.job.known import must_find_model
from paceline.job.parameters import Patterns, matching, names_of
from paceline.job.quantize import Quantize
from paceline.job.spec import Args, Spec, resolve_import_path
from paceline.storage.url import is_url

if TYPE_CHECKING:
    from torch import nn


DCP = "dcp:"  # begins the `weights` that are a checkpoint of torch.distributed.checkpoint
Task = Literal[
    "causal_lm", "masked_lm", "image_classification", "sequence_classification", "token_classification", "seq2seq_lm"
]


class ModelSpec(Spec):
    """A model, specified by exactly one of `zoo`, `factory`, `hf` and `transformer`.

    - `model: mlp` or `model: {zoo: gpt, args: {layers: 4}}` names a built-in model.
    - `model: pkg.mod:factory` or `./my_model.py:factory` names a callable that accepts `args` as keyword arguments and
      returns an `nn.Module`.
    - `{hf: FOLDER}` names a Hugging Face folder, whose configuration and safetensors weights are used. `{hf:
      FOLDER/config.json}` names only the configuration, so the weights are initialised randomly. `task` defaults from
      the `architectures` of the configuration, and `args` override its values. `dtype` is the type in which the
      weights are held, and `attention` the implementation of attention. Nothing is downloaded from a hub.
    - `{transformer: {layers: 80, hidden: 8192, heads: 64, seq: 4096, vocab: 128256}}` gives only the dimensions of a
      model, which are sufficient for planning but not for training.

    `weights` is the path or URL of the initial weights: a safetensors file, or a folder in Hugging Face's layout.
    `dcp:FOLDER` is a local checkpoint of `torch.distributed.checkpoint`. Without `weights`, the weights come from the
    folder that `hf` names, or are initialised randomly. Parameters that match a pattern of `freeze` are not trained.
    """

    short: ClassVar[str | None] = "zoo"
    zoo: str | None = None
    factory: str | None = None
    hf: DataPath | None = None
    transformer: Dimensions | None = None
    task: Task | None = None
    dtype: Literal["fp32", "bf16"] | None = None
    attention: Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"] | None = None
    weights: DataPath | None = None
    freeze: Patterns = ()
    args: Args = Field(default_factory=dict)
    _quantize: Quantize | None = PrivateAttr(None)
    _adapter: AdapterSpec | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _a_colon_means_an_import_path(cls, value: Any) -> Any:
        value = {"zoo": value} if isinstance(value, str) else value
        if isinstance(value, dict) and ":" in str(value.get("zoo")) and "factory" not in value:
            return {"factory" if key == "zoo" else key: entry for key, entry in value.items()}
        return value

    @field_validator("factory")
    @classmethod
    def _resolve_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        return value and resolve_import_path(value, info.context)

    @field_validator("hf", "weights")
    @classmethod
    def _resolve(cls, value: Path | str | None, info: ValidationInfo) -> Path | str | None:
        if value is None:
            return value
        if is_url(value):
            if page := _HUB_PAGE.fullmatch(value):
                raise _on_the_hub(value, page[1])
            return value
        form, value = (DCP, str(value)[len(DCP) :]) if str(value).startswith(DCP) else ("", value)
        path = Path((info.context or {}).get("base", Path.cwd()) / Path(value).expanduser()).resolve()
        if not path.exists():
            if not form and _HUB_NAME.fullmatch(str(value)) and not path.parent.exists():
                raise _on_the_hub(value, str(value))
            raise InvalidValue("model.file_missing", "no such file or folder: {path}", path=path)
        return f"{form}{path}" if form else path

    @model_validator(mode="after")
    def _exactly_one_source(self) -> ModelSpec:
        if sum(x is not None for x in (self.zoo, self.factory, self.hf, self.transformer)) != 1:
            raise InvalidValue("model.source_ambiguous", "exactly one of zoo, factory, hf and transformer is needed")
        of_hf = [key for key in ("task", "dtype", "attention") if getattr(self, key) is not None]
        if self.hf is None and of_hf:
            raise InvalidValue(
                "model.only_with_hf",
                "only a model with hf can have {keys}, e.g. {{hf: FOLDER, {key}: {value}}}",
                keys=of_hf,
                key=of_hf[0],
                value=getattr(self, of_hf[0]),
            )
        if self.transformer is not None and (self.weights is not None or self.args or self.freeze):
            raise InvalidValue(
                "model.transformer_with_weights",
                "transformer cannot have weights, freeze or args, because only the dimensions of its model are known",
            )
        return self

    @model_validator(mode="after")
    def _complete_folder(self) -> ModelSpec:
        """Check the folder, and read the task from its configuration."""
        if self.hf is None or is_url(self.hf):  # a URL is fetched later
            config = None
        else:
            config = _config_in(self.hf)
            if self.weights is None and self.hf.is_dir():
                _must_have_weights(self.hf)
        if self.hf is not None and self.task is None:
            stated = architectures(config) if config is not None else []
            tasks = {task for name in stated if (task := _task_of(name)) is not None}
            if len(tasks) != 1:
                raise InvalidValue(
                    "model.task_missing",
                    "{hf} does not determine the task ({architectures}). Set it, e.g. {{hf: {name}, task: "
                    "causal_lm}}. Known tasks: {tasks}",
                    hf=self.hf,
                    architectures=f"architectures: {', '.join(stated)}" if stated else "no architectures",
                    name=Path(self.hf).name,
                    tasks=get_args(Task),
                )
            object.__setattr__(self, "task", tasks.pop())
        return self

    def must_be_at_hand(self) -> None:
        """Raise an error if only the dimensions of the model are known.

        Raises:
            JobError: the model can be planned but not trained. The message proposes models that can be trained.
        """
        if self.transformer is not None:
            raise JobError(
                "model.dimensions_only",
                "model.transformer gives only dimensions, which can be planned but not trained. To train, name a model "
                "that can be built: {{hf: FOLDER}} for a Hugging Face folder, {{hf: config.json, task: causal_lm}} for "
                "a Hugging Face configuration with these dimensions, or {{zoo: gpt, args: {{layers: …, hidden: …, "
                "heads: …, context: …, vocab: …}}}}",
            )

    def config_file(self) -> Path:
        """Return the local path of the configuration, which is fetched from a URL if needed."""
        path = _at_hand(self.hf)
        assert path is not None, "only a model with hf has a configuration"
        return path / _CONFIG if path.is_dir() else path

    @property
    def folder(self) -> Path | None:
        """Local folder with the configuration, the tokenizer and generation settings; None without `hf`."""
        return None if self.hf is None else self.config_file().parent

    def weights_path(self) -> Path | None:
        """Return the initial weights, as `weights_from` takes them; None if they are random.

        A URL is fetched if it is not cached.
        """
        if self.weights is not None:
            return _at_hand(self.weights)
        path = _at_hand(self.hf)
        return path if path is not None and path.is_dir() else None

    @property
    def quantize(self) -> Quantize | None:
        """Format of the frozen linear layers: the job's `quantize`."""
        return self._quantize

    def quantizing(self, kind: Quantize | None) -> ModelSpec:
        """Return a copy of this spec whose frozen linear layers are quantized."""
        spec = self.model_copy()
        spec._quantize = kind
        return spec

    @property
    def adapter(self) -> AdapterSpec | None:
        """Adapter of the model: the job's `adapter`."""
        return self._adapter

    def adapting(self, adapter: AdapterSpec | None) -> ModelSpec:
        """Return a copy of this spec whose model has an adapter.

        Raises:
            InvalidValue: the model cannot have one.
        """
        if adapter is not None and self.freeze:
            raise InvalidValue(
                "adapter.with_freeze",
                "adapter freezes all parameters except its own, so model.freeze has no effect. Remove "
                "model.freeze. To train more parameters, name them in adapter.lora.train.",
            )
        if adapter is not None and self.transformer is not None:
            raise InvalidValue(
                "adapter.of_dimensions",
                "model.transformer gives only dimensions, which have no layers for an adapter. Name a configuration "
                "with the same dimensions: model: {{hf: config.json, task: causal_lm}}",
            )
        spec = self.model_copy()
        spec._adapter = adapter
        return spec

    def build(self) -> nn.Module:
        """Build the model on the CPU, initialised from torch's current random state.

        Parameters that match `freeze` have `requires_grad=False`. With an adapter, only its parameters are trained.
        Layers that the job quantizes have their ordinary weights and a mark (`zoo/quantized.py`).

        Raises:
            JobError: the zoo model is unknown (the message names the nearest), an import fails, the arguments are
                wrong, the result is not an `nn.Module`, only the dimensions of the model are known, or a pattern of
                `freeze` or of the adapter matches nothing.
        """
        self.must_be_at_hand()
        from paceline.job.zoo import build_model

        model = build_model(self)
        if self.freeze:
            held = dict(model.named_parameters())
            for name in matching("model.freeze", self.freeze, names_of(model)):
                held[name].requires_grad_(False)
        if self.adapter is not None:
            from paceline.job.zoo.adapters import add_lora

            add_lora(model, self.adapter.lora)
        if self.quantize is not None:
            from paceline.job.zoo.quantized import mark

            mark(model, self.quantize)
        return model

    def input_shape(self) -> tuple[int, ...] | None:
        """Return the sample shape (channels, height, width) that the model requires; None if it accepts any shape.

        Raises:
            JobError: the model is unknown, an import fails, or the arguments are wrong.
        """
        self.must_be_at_hand()
        from paceline.job.zoo import input_shape

        return input_shape(self)


_CONFIG = "config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.json)(?<!\.safetensors)")
_HUB_PAGE = re.compile(rf"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/({_HUB_NAME.pattern})(?:/|/tree/.*)?")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
# end of the name of an architecture in transformers, and its task
_TASKS: dict[str, Task] = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForImageClassification": "image_classification",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
}


def _on_the_hub(value: object, name: str) -> InvalidValue:
    return InvalidValue(
        "model.on_the_hub",
        "{value} is not a folder of this machine, and runs download no models from the Hugging Face hub. Download the "
        "model once with `hf download {name} --local-dir {folder}`, and name that folder.",
        value=value,
        name=name,
        folder=name.partition("/")[2],
    )


def _at_hand(path: Path | str | None) -> Path | None:
    if not is_url(path):
        return None if path is None else Path(path)
    from paceline.storage.store import at_hand  # imports fsspec, which few jobs need

    return at_hand(path)


def _config_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / _CONFIG).is_file():
        raise InvalidValue(
            "model.folder_without_config",
            "{folder} is not the folder of a Hugging Face model, because it has no {config}",
            folder=path,
            config=_CONFIG,
        )
    return path / _CONFIG


def _must_have_weights(folder: Path) -> None:
    if any((folder / name).is_file() for name in _WEIGHTS):
        return
    if pickled := sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern)):
        raise InvalidValue(
            "model.weights_pickled",
            "{folder} has its weights only as {file}, a pickle, which can run code when it is read. Convert the "
            "weights once, in an environment that you trust: model.save_pretrained(FOLDER) of transformers writes "
            "safetensors.",
            folder=folder,
            file=pickled[0],
        )
    raise InvalidValue(
        "model.folder_without_weights",
        "{folder} has no weights ({names}). To start from random weights, name {config} itself. To start from other "
        "weights, set model.weights.",
        folder=folder,
        names=" or ".join(_WEIGHTS),
        config=folder / _CONFIG,
    )


def architectures(config: Path) -> list[str]:
    """Return the architectures that a configuration file states; none if it cannot be read."""
    try:
        found = json.loads(config.read_bytes())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):  # `build` explains what is wrong with the file
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _task_of(architecture: str) -> Task | None:
    if architecture.startswith(("T5For", "MT5For", "Bart", "MBart")) and "ConditionalGeneration" in architecture:
        return "seq2seq_lm"
    return next((task for end, task in _TASKS.items() if architecture.endswith(end)), None)


# letters that `pattern` may contain
STATE_SPACE, DELTA, ATTENTION, FEED_FORWARD, MIXTURE = "MD*-E"
_OF_EXPERTS = ("expert_ffn", "expert_hidden", "shared_experts", "shared_ffn", "dense_layers", "moe_every")


class LatentAttention(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1).

    Each query and key has `nope` elements without rotary position embedding and `rope` elements with it. Each value has
    `value` elements. Queries are projections of a vector of size `q_rank`, or of the residual stream if `q_rank` is not
    set. Keys and values are projections of a vector of size `kv_rank`.
    """

    q_rank: int | None = Field(None, ge=1)
    kv_rank: int = Field(ge=1)
    nope: int = Field(ge=1)
    rope: int = Field(ge=1)
    value: int = Field(ge=1)


class StateSpace(Spec):
    """Dimensions of state-space layers like those of Mamba-2 (arXiv:2405.21060).

    A layer has `heads` heads of width `head_dim`. The state of a head has `state` × `head_dim` elements. The heads of
    each of the `groups` share the projections into and out of the state. The convolution covers `conv` tokens.
    """

    state: int = Field(ge=1)
    heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    groups: int = Field(1, ge=1)
    conv: int = Field(4, ge=1)

    @property
    def inner(self) -> int:
        """Total width of all heads."""
        return self.heads * self.head_dim


class GatedDelta(Spec):
    """Dimensions of linear attention with the gated delta rule (arXiv:2412.06464).

    A layer has `value_heads` value heads of width `head_dim`, which share `key_heads` heads of queries and keys. The
    convolution covers `conv` tokens.
    """

    key_heads: int = Field(ge=1)
    value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    conv: int = Field(4, ge=1)


class Dimensions(Spec):
    """Dimensions of a language model, used instead of its code.

    For example `{layers: 80, hidden: 8192, ffn: 28672, heads: 64, kv_heads: 8, seq: 4096, vocab: 128256}`.

    `name` names a known model, which supplies all values that are not given: `{name: llama-3.1-8b, seq: 4096}`.

    By default, `ffn` is 4 × hidden, `kv_heads` equals `heads`, and `head_dim` is hidden / heads. With `gated`, each
    feed-forward part has three matrices (SwiGLU) instead of two. `biases` selects whether all products and norms, only
    the projections of queries, keys and values, or no layers have biases; by default, gated models have none. With
    `tied`, the output head shares the weights of the embedding. `positions` adds a table of learned positions; its
    length is the sequence length or the given number. `dropout` states whether the model has dropout; by default, gated
    models have none. With `parallel`, attention and the feed-forward part read the same normalized input, and their
    outputs are added together. `window` is the number of past tokens that attention sees; one of every `full_every`
    layers sees all tokens. `mla` selects latent attention.

    With `experts`, layers have this number of feed-forward parts of width `expert_ffn`. Every token passes through
    `top_k` experts and through the `shared_experts`, whose total width is `shared_ffn`. The first `dense_layers` layers
    have a dense part of width `ffn` instead. Of every `moe_every` later layers, only one has experts. With
    `expert_hidden`, the experts work on a narrower projection. `mtp` is the number of layers for multi-token
    prediction. An encoder of `encoder_layers` layers reads `source_seq` tokens, and each of the `layers` also attends
    to these tokens. `predicted` adds a head that predicts masked tokens, for this fraction of the tokens. `pooled` adds
    one output for the whole sequence. `segments` is the number of rows in a table of segment embeddings. `pattern` has
    one letter per layer, which replaces the usual pair of attention and feed-forward part: `M` state space (see
    `mamba`), `D` linear attention (see `delta`), `*` attention, `-` feed-forward part, `E` mixture of experts. With
    `gated_attention`, the output of attention is multiplied by a gate of the same width.
    """

    name: str | None = None
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    ffn: int | None = Field(None, ge=1)
    heads: int = Field(ge=1)
    kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)
    seq: int = Field(ge=1)
    vocab: int = Field(ge=1)
    gated: bool = False
    biases: Literal["all", "qkv", "none"] | None = None
    tied: bool = True
    positions: bool | int = True
    causal: bool = True
    dropout: bool = True
    parallel: bool = False
    window: int | None = Field(None, ge=1)
    full_every: int | None = Field(None, ge=2)
    mla: LatentAttention | None = None
    experts: int = Field(0, ge=0)
    top_k: int = Field(1, ge=1)
    expert_ffn: int | None = Field(None, ge=1)
    expert_hidden: int | None = Field(None, ge=1)
    shared_experts: int = Field(0, ge=0)
    shared_ffn: int | None = Field(None, ge=1)
    dense_layers: int = Field(0, ge=0)
    moe_every: int = Field(1, ge=1)
    mtp: int = Field(0, ge=0)
    encoder_layers: int = Field(0, ge=0)
    source_seq: int | None = Field(None, ge=1)
    predicted: float | None = Field(None, gt=0, le=1)
    pooled: bool = False
    segments: int = Field(0, ge=0)
    gated_attention: bool = False
    mamba: StateSpace | None = None
    delta: GatedDelta | None = None
    pattern: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            return {**must_find_model(value["name"]).dimensions, **value}
        return value

    @model_validator(mode="after")
    def _divide(self) -> Dimensions:
        if self.hidden % self.heads and self.head_dim is None and self.mla is None:
            fitting = self.heads * max(1, round(self.hidden / self.heads))
            raise InvalidValue(
                "model.hidden_not_divisible",
                "hidden {hidden} is not a multiple of heads {heads}. Use {fitting}, or give head_dim.",
                hidden=self.hidden,
                heads=self.heads,
                fitting=fitting,
            )
        if self.heads % self.key_value_heads:
            raise InvalidValue(
                "model.kv_heads",
                "heads ({heads}) is not a multiple of kv_heads ({key_value_heads})",
                heads=self.heads,
                key_value_heads=self.key_value_heads,
            )
        return self

    @model_validator(mode="after")
    def _belong_together(self) -> Dimensions:
        if self.experts and self.top_k > self.experts:
            raise InvalidValue(
                "model.experts_top_k",
                "top_k is {top_k}, but the model has {experts} experts. It must be at most the number of experts.",
                top_k=self.top_k,
                experts=self.experts,
            )
        defaults = {name: Dimensions.model_fields[name].default for name in _OF_EXPERTS}
        if not self.experts and (alone := [name for name in _OF_EXPERTS if getattr(self, name) != defaults[name]]):
            raise InvalidValue("model.no_experts", "{key} needs experts. Set their number with experts.", key=alone[0])
        if self.mla and (self.kv_heads or self.head_dim):
            raise InvalidValue(
                "model.mla_alone",
                "mla cannot be combined with kv_heads or head_dim, because it has its own nope, rope and value",
            )
        if self.full_every and not self.window:
            raise InvalidValue(
                "model.full_every_alone",
                "full_every has no effect, because all layers see all tokens. Set window to the number of tokens "
                "that the other layers see.",
            )
        if self.source_seq and not self.encoder_layers:
            raise InvalidValue(
                "model.no_encoder", "source_seq needs an encoder. Set its number of layers with encoder_layers."
            )
        return self

    @model_validator(mode="after")
    def _pattern(self) -> Dimensions:
        if self.pattern is None:
            for key, letter in (("mamba", STATE_SPACE), ("delta", DELTA)):
                if getattr(self, key):
                    raise InvalidValue(
                        "model.pattern_missing",
                        '{key} needs a pattern that marks its layers, such as "{letter}-{letter}-*-"',
                        key=key,
                        letter=letter,
                    )
            return self
        if len(self.pattern) != self.layers:
            raise InvalidValue(
                "model.pattern_length",
                "pattern has {letters} letters, but the model has {layers} layers. It needs one letter for each layer.",
                letters=len(self.pattern),
                layers=self.layers,
            )
        if strange := set(self.pattern) - {STATE_SPACE, DELTA, ATTENTION, FEED_FORWARD, MIXTURE}:
            raise InvalidValue(
                "model.pattern_letter",
                'pattern contains an unknown letter "{letter}". It can contain only M (mamba), D (delta), *, - and E.',
                letter=min(strange),
            )
        for letter, key in ((STATE_SPACE, "mamba"), (DELTA, "delta"), (MIXTURE, "experts")):
            if letter in self.pattern and not getattr(self, key):
                raise InvalidValue(
                    "model.pattern_without_key",
                    'pattern contains "{letter}", but {key} is not set. Set {key}, too.',
                    letter=letter,
                    key=key,
                )
        return self

    @property
    def feed_forward(self) -> int:
        """Inner width of a dense feed-forward part."""
        return self.ffn or 4 * self.hidden

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.expert_ffn or self.feed_forward

    @property
    def shared_width(self) -> int:
        """Total inner width of all shared experts."""
        return self.shared_ffn or self.shared_experts * self.expert_width

    @property
    def key_value_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of an attention head; not used with `mla`."""
        return self.head_dim or self.hidden // self.heads

    @property
    def source(self) -> int:
        """Number of tokens that the encoder reads."""
        return self.source_seq or self.seq

    @property
    def table(self) -> int:
        """Number of rows in the table of learned positions."""
        return self.seq if self.positions is True else int(self.positions)

    @property
    def biased(self) -> bool:
        """True if products and norms have biases."""
        return (self.biases or ("none" if self.gated else "all")) == "all"
