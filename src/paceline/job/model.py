"""The model of a job: zoo, Hugging Face config, user's factory, or dimensions alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.errors import JobError
from paceline.job.data import DataPath
from paceline.job.read.dimensions import Dimensions
from paceline.job.read.imports import resolve_import_path
from paceline.job.spec import Args, Spec
from paceline.storage.url import is_url

if TYPE_CHECKING:
    from torch import nn

_DIMENSIONS_ONLY = (
    "model.transformer gives dimensions alone: they can be planned, not trained. To train, name a model that can be "
    "built: {hf: config.json, task: causal_lm} for a Hugging Face configuration with these dimensions, or {zoo: gpt, "
    "args: {layers: …, hidden: …, heads: …, context: …, vocab: …}}"
)
Task = Literal[
    "causal_lm", "masked_lm", "image_classification", "sequence_classification", "token_classification", "seq2seq_lm"
]


class ModelSpec(Spec):
    """Exactly one of `zoo`, `factory`, `hf`, `transformer`.

    - `model: mlp` or `{zoo: gpt, args: {layers: 4}}`: a built-in model.
    - `model: pkg.mod:factory` or `./my_model.py:factory`: anything that returns an `nn.Module`; `args` go to it as
      keywords.
    - `{hf: config.json, task: causal_lm}`: a Hugging Face configuration; weights are initialised, nothing is
      downloaded. `args` override values of the configuration.
    - `{transformer: {layers: 80, hidden: 8192, heads: 64, seq: 4096, vocab: 128256}}`: by its dimensions, to be planned
      and not trained.

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
            raise ValueError(f"no such file{'' if info.field_name == 'hf' else ' or folder'}: {path}")
        return path

    @model_validator(mode="after")
    def _exactly_one_source(self) -> ModelSpec:
        if sum(x is not None for x in (self.zoo, self.factory, self.hf, self.transformer)) != 1:
            raise ValueError("name exactly one of zoo, factory, hf, transformer")
        if (self.hf is None) != (self.task is None):
            raise ValueError("hf needs a task (and only hf has one), e.g. {hf: config.json, task: causal_lm}")
        if self.transformer is not None and (self.weights is not None or self.args):
            raise ValueError("transformer has neither weights nor args: its dimensions are all that is known of it")
        return self

    def must_be_at_hand(self) -> None:
        """Refuse a model of which only the dimensions are known.

        Raises:
            JobError: it can be planned, not trained; says what to name instead.
        """
        if self.transformer is not None:
            raise JobError(_DIMENSIONS_ONLY)

    def build(self) -> nn.Module:
        """The model on the CPU, initialised from torch's current random state.

        Raises:
            JobError: an unknown zoo model (the nearest is named), an import that fails, arguments that do not fit,
                a result that is not an `nn.Module`, or a model of which only the dimensions are known.
        """
        self.must_be_at_hand()
        from paceline.job.zoo import build_model

        return build_model(self)

    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one sample (channels, height, width) that the model needs; None if the data decides.

        Raises:
            JobError: see `build`.
        """
        self.must_be_at_hand()
        from paceline.job.zoo import input_shape

        return input_shape(self)
