"""Model of a job: zoo, Hugging Face config, user's factory, or dimensions only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from paceline.errors import InvalidValue, JobError
from paceline.job.data import DataPath
from paceline.job.known import must_find_model
from paceline.job.parameters import matching, names_of
from paceline.job.spec import Args, Spec, resolve_import_path
from paceline.storage.url import is_url

if TYPE_CHECKING:
    from torch import nn


Task = Literal[
    "causal_lm", "masked_lm", "image_classification", "sequence_classification", "token_classification", "seq2seq_lm"
]


class ModelSpec(Spec):
    """Exactly one of `zoo`, `factory`, `hf`, `transformer`.

    - `model: mlp` or `{zoo: gpt, args: {layers: 4}}`: a built-in model.
    - `model: pkg.mod:factory` or `./my_model.py:factory`: anything that returns an `nn.Module` and accepts `args` as
      keywords.
    - `{hf: config.json, task: causal_lm}`: a Hugging Face configuration; weights are initialised, nothing is
      downloaded. `args` override values of the configuration.
    - `{transformer: {layers: 80, hidden: 8192, heads: 64, seq: 4096, vocab: 128256}}`: a model described by its
      dimensions, for planning only.

    `weights` is a safetensors file, or a folder in Hugging Face's layout, with the weights to start from instead of
    fresh ones; or the URL of either.
    """

    short: ClassVar[str | None] = "zoo"
    zoo: str | None = None
    factory: str | None = None
    hf: Path | None = None
    transformer: Dimensions | None = None
    task: Task | None = None
    weights: DataPath | None = None
    args: Args = Field(default_factory=dict)
    _frozen: tuple[str, ...] = PrivateAttr(())

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
        if value is None or is_url(value):
            return value
        path = Path((info.context or {}).get("base", Path.cwd()) / Path(value).expanduser()).resolve()
        if not (path.is_file() if info.field_name == "hf" else path.exists()):
            raise InvalidValue(
                "model.file_missing",
                "no such file{or_folder}: {path}",
                or_folder="" if info.field_name == "hf" else " or folder",
                path=path,
            )
        return path

    @model_validator(mode="after")
    def _exactly_one_source(self) -> ModelSpec:
        if sum(x is not None for x in (self.zoo, self.factory, self.hf, self.transformer)) != 1:
            raise InvalidValue("model.source_ambiguous", "exactly one of zoo, factory, hf and transformer is needed")
        if (self.hf is None) != (self.task is None):
            raise InvalidValue(
                "model.task_missing",
                "hf needs a task, and only hf can have one, e.g. {{hf: config.json, task: causal_lm}}",
            )
        if self.transformer is not None and (self.weights is not None or self.args):
            raise InvalidValue(
                "model.transformer_with_weights",
                "transformer cannot have weights or args, because only the dimensions of its model are known",
            )
        return self

    def must_be_at_hand(self) -> None:
        """Refuse a model of which only the dimensions are known.

        Raises:
            JobError: the model can be planned but not trained; the message says what to name instead.
        """
        if self.transformer is not None:
            raise JobError(
                "model.dimensions_only",
                "model.transformer gives only dimensions, which can be planned but not trained. To train, name a model "
                "that can be built: {{hf: config.json, task: causal_lm}} for a Hugging Face configuration with these "
                "dimensions, or {{zoo: gpt, args: {{layers: …, hidden: …, heads: …, context: …, vocab: …}}}}",
            )

    @property
    def frozen(self) -> tuple[str, ...]:
        """Patterns of the parameters that are not trained: the job's `freeze`."""
        return self._frozen

    def freezing(self, patterns: tuple[str, ...]) -> ModelSpec:
        """Return the same model with these parameters frozen."""
        spec = self.model_copy()
        spec._frozen = patterns
        return spec

    def build(self) -> nn.Module:
        """Build the model on the CPU, initialised from torch's current random state.

        Parameters that the job freezes have no `requires_grad`.

        Raises:
            JobError: the zoo model is unknown (the message names the nearest), an import fails, the arguments are
                wrong, the result is not an `nn.Module`, only the dimensions of the model are known, or a pattern of
                `freeze` matches no parameter.
        """
        self.must_be_at_hand()
        from paceline.job.zoo import build_model

        model = build_model(self)
        if self.frozen:
            held = dict(model.named_parameters())
            for name in matching("freeze", self.frozen, names_of(model)):
                held[name].requires_grad_(False)
        return model

    def input_shape(self) -> tuple[int, ...] | None:
        """Return the sample shape (channels, height, width) that the model needs; None if any.

        Raises:
            JobError: see `build`.
        """
        self.must_be_at_hand()
        from paceline.job.zoo import input_shape

        return input_shape(self)


# letters of `pattern`
STATE_SPACE, DELTA, ATTENTION, FEED_FORWARD, MIXTURE = "MD*-E"
_OF_EXPERTS = ("expert_ffn", "expert_hidden", "shared_experts", "shared_ffn", "dense_layers", "moe_every")


class LatentAttention(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1).

    Queries and keys have `nope` elements without and `rope` elements with rotary position; values have `value`
    elements. They are projections of vectors of size `q_rank` and `kv_rank`; without `q_rank`, queries come from the
    residual stream.
    """

    q_rank: int | None = Field(None, ge=1)
    kv_rank: int = Field(ge=1)
    nope: int = Field(ge=1)
    rope: int = Field(ge=1)
    value: int = Field(ge=1)


class StateSpace(Spec):
    """State-space layers as in Mamba-2 (arXiv:2405.21060).

    `heads` of `head_dim`, each with a state of `state` × `head_dim`; `groups` share its two projections. A convolution
    has a width of `conv` tokens.
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
    """Linear attention by the gated delta rule (arXiv:2412.06464).

    `value_heads` of `head_dim` share `key_heads` of queries and keys. A convolution has a width of `conv` tokens.
    """

    key_heads: int = Field(ge=1)
    value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    conv: int = Field(4, ge=1)


class Dimensions(Spec):
    """Dimensions of a language model, used instead of its code.

    For example `{layers: 80, hidden: 8192, ffn: 28672, heads: 64, kv_heads: 8, seq: 4096, vocab: 128256}`.

    `name` is the name of a known model, which supplies all other values: `{name: llama-3.1-8b, seq: 4096}`.

    By default, `ffn` is 4 × hidden, `kv_heads` equals heads, and `head_dim` is hidden / heads. `gated`: three matrices
    in each feed-forward part (SwiGLU) instead of two. `biases`: in all products and norms, only in queries, keys and
    values, or none; gated models have none. `tied`: the head is the embedding. `positions`: a table of learned
    positions, with the length of a sequence or the given number. `dropout`: whether the model has dropout (gated models
    have none). `parallel`: attention and the feed-forward part read the same norm and are added together. `window`:
    number of past tokens that attention sees, in all layers except one of `full_every`. `mla`: latent attention.

    With `experts`, layers have this number of feed-forward parts of width `expert_ffn`. Every token goes through
    `top_k` of them and through `shared_experts`, whose total width is `shared_ffn`. The first `dense_layers`, and all
    but one of `moe_every` layers, have a dense part of width `ffn`. With `expert_hidden`, experts work on a narrower
    projection. `mtp`: layers that predict further tokens. `encoder_layers` read `source_seq` tokens, which each of
    `layers` attends to as well. `predicted`: a head for masked tokens, for this fraction of the tokens. `pooled`: one
    more output, for the whole sequence. `segments`: number of rows in a table of segments. `pattern`: one letter per
    layer, instead of attention and a feed-forward part in each: `M` state space (of `mamba`), `D` linear attention (of
    `delta`), `*` attention, `-` feed-forward, `E` mixture. `gated_attention`: the output of attention is multiplied by
    a gate of the same width.
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
                "model.mla_alone", "mla uses its own nope, rope and value instead of kv_heads and head_dim"
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
                        '{key}: mark its layers in pattern, such as "{letter}-{letter}-*-"',
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
        """Width of a dense feed-forward part."""
        return self.ffn or 4 * self.hidden

    @property
    def expert_width(self) -> int:
        """Width of an expert."""
        return self.expert_ffn or self.feed_forward

    @property
    def shared_width(self) -> int:
        """Total width of all shared experts."""
        return self.shared_ffn or self.shared_experts * self.expert_width

    @property
    def key_value_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of a head of queries, keys and values, without `mla`."""
        return self.head_dim or self.hidden // self.heads

    @property
    def source(self) -> int:
        """Number of tokens that the encoder reads."""
        return self.source_seq or self.seq

    @property
    def table(self) -> int:
        """Number of rows of the position table."""
        return self.seq if self.positions is True else int(self.positions)

    @property
    def biased(self) -> bool:
        """True if products and norms have biases."""
        return (self.biases or ("none" if self.gated else "all")) == "all"
