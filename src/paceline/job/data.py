"""The data of a job: its source, and its split into training and validation sets."""

from __future__ import annotations

import datetime as dates
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PositiveInt,
    PrivateAttr,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from paceline.errors import DataError, InvalidValue, StorageError
from paceline.job.spec import Args, Spec, resolve_import_path
from paceline.storage.url import DATA_VERSIONS, checked_url, is_url, local_path
from paceline.text import nearest

if TYPE_CHECKING:
    from paceline.job.samples import DataSets


ImageShape = tuple[PositiveInt, PositiveInt, PositiveInt]  # channels, height, width


def _path_or_url(value: Any, to_path: ValidatorFunctionWrapHandler) -> Any:
    if not is_url(value):
        return to_path(value)
    try:
        url = checked_url(value)
    except StorageError as error:
        raise InvalidValue.of_error(error) from None
    return local_path(url) or url


def _not_empty(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    if not paths:
        raise InvalidValue("data.no_path", "at least one file or folder is needed")
    return paths


# A URL remains a string until `build` replaces it with the path of the local copy.
DataPath = Annotated[Path, WrapValidator(_path_or_url), PlainSerializer(str, when_used="json")]


_SHARE_OF = {"digits", "synthetic"}  # types without files
_OF_TOKENIZER = ("tokenizer", "template")
_PATHS = ("path", "held_out_path", "factory", "held_out_factory", "collate", "collate_held_out", "map")


class _Data(Spec):
    # fraction of the samples that form the validation set, which is the same for every plan
    held_out: float = Field(default=0.1, ge=0, lt=1)
    # the test set, which is evaluated once, at the end of training: a file, a folder, a factory, or a fraction of the
    # samples in addition to `held_out`
    test: float | str | None = None
    num_workers: int = Field(default=0, ge=0)  # number of loader processes per rank
    # use only this number of samples, the first ones; also applies to a validation set with its own files
    limit: int | None = Field(default=None, ge=1)
    collate: str | None = None  # import path of a function that makes a batch from a list of samples
    collate_held_out: str | None = None  # the `collate` function of the validation set; None uses `collate`

    @classmethod
    def long_form(cls, value: Any) -> Any:
        """Expand an import path or the name of a data type to a mapping."""
        if not isinstance(value, str):
            return value
        return {"kind": "dataset", "factory": value} if ":" in value else {"kind": value}

    @field_validator(*_PATHS, *_OF_TOKENIZER, mode="after", check_fields=False)
    @classmethod
    def _resolve(cls, value: Any, info: ValidationInfo) -> Any:
        base = (info.context or {}).get("base", Path.cwd())
        if isinstance(value, str) and not is_url(value):
            return resolve_import_path(value, info.context)
        if isinstance(value, tuple):
            return tuple(p if is_url(p) else _expand(p, base) for p in value)
        if info.field_name == "tokenizer" and value is not None and (folder := _expand(value, base)).is_dir():
            return folder / "tokenizer.json"
        return value if is_url(value) or not value else _expand(value, base)

    @field_validator("test", mode="after")
    @classmethod
    def _resolve_test(cls, value: float | str | None, info: ValidationInfo) -> float | str | None:
        if isinstance(value, (float, int)) and not 0 < value < 1:
            raise InvalidValue(
                "data.test_share",
                "the test set must be a share between 0 and 1, a path or an import path, not {value}",
                value=value,
            )
        return cls.resolved(value, info.context) if isinstance(value, str) else value

    @classmethod
    def resolved(cls, source: str, context: Mapping[str, Any] | None = None) -> str:
        """Return the absolute path, URL or import path of a source of this data type.

        Raises:
            InvalidValue: data of this type has no paths.
        """
        kind = get_args(cls.model_fields["kind"].annotation)[0]
        if kind in _SHARE_OF:
            raise InvalidValue(
                "data.no_other_source", "{kind} has no files. Give a share of its samples, e.g. 0.1.", kind=kind
            )
        if kind in ("dataset", "iterable"):
            return resolve_import_path(source, context)
        if not is_url(source):
            return str(_expand(Path(source), (context or {}).get("base", Path.cwd())))
        try:
            return checked_url(source)
        except StorageError as error:
            raise InvalidValue.of_error(error) from None

    @property
    def is_tokenized(self) -> bool:
        """True if the samples are tokens of a tokenizer, and their labels the next tokens."""
        return False

    def of_model(self, folder: Path) -> Self:
        """Return a copy that can use the tokenizer in the model's folder."""
        return self

    @property
    def keeps_no_validation_set(self) -> bool:
        """Return True if no samples are held out and no validation set is named."""
        named = getattr(self, "held_out_path", None) or getattr(self, "held_out_factory", None)
        return not self.held_out and not named

    def fetch(self) -> dict[str, str]:
        """Download the files that a URL names, unless this host has the current version.

        The returned environment variables make the ranks on all hosts read exactly the fetched versions.

        Raises:
            DataError: the URL has no files, or the files cannot be read or stored. The message names the URL and the
                remedy.
        """
        versions: dict[str, str] = {}

        def newest(url: str) -> Path:
            from paceline.storage.store import fetched, version_of  # imports fsspec, which few jobs need

            copy = fetched(url)
            versions[url] = version_of(copy)
            return copy

        self._with_paths(newest)
        return {DATA_VERSIONS: json.dumps(versions)} if versions else {}

    def _with_paths(self, copy_of: Callable[[str], Path]) -> Self:
        """Return a copy of the spec in which a local path replaces each URL."""

        def local(field: str, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(local(field, one) for one in value)
            try:
                return copy_of(value) if is_url(value) else value
            except StorageError as error:
                raise DataError.of_error(error, f"data.{field}") from error

        fields = {field: getattr(self, field, None) for field in ("path", "held_out_path", "test")}
        paths = {field: local(field, value) for field, value in fields.items() if value is not None}
        if isinstance(paths.get("test"), Path):
            paths["test"] = str(paths["test"])
        return self.model_copy(update=paths)

    def build(self, *, input_shape: tuple[int, ...] | None, seed: int) -> DataSets:
        """Build the training, validation and test sets.

        Images are resized to `input_shape` (channels, height, width) if the model requires a shape.

        Raises:
            DataError: the data is missing, unreadable, empty or too small to split; the data contains negative labels,
                rows of different lengths, NaN or Inf; or an optional package is missing.
        """
        from paceline.job.zoo.datasets import build_data

        def copy(url: str) -> Path:
            from paceline.storage.store import at_hand

            return at_hand(url)

        return build_data(cast("DataSpec", self._with_paths(copy)), input_shape=input_shape, seed=seed)


class Digits(_Data):
    """scikit-learn's bundled 1,797 real images of handwritten digits (8 x 8, grey, 10 classes)."""

    kind: Literal["digits"]
    held_out: float = Field(default=0.2, ge=0, lt=1)
    shape: ImageShape | None = None  # by default, the shape that the model needs, or 1 x 8 x 8


class Cifar10(_Data):
    """CIFAR-10 in its binary distribution: a folder with `data_batch_*.bin`.

    If the folder contains `test_batch.bin`, this file is the validation set, unless `held_out` is 0 or `test` names the
    file.
    """

    kind: Literal["cifar10"]
    path: DataPath


class Images(_Data):
    """A folder with one subfolder of images per class.

    Images are resized, and cropped around the centre, to `shape` (1 or 3 channels). By default, the shape is the one
    that the model needs. `held_out_path` names another such folder, the validation set.
    """

    kind: Literal["images"]
    path: DataPath
    held_out_path: DataPath | None = None
    shape: ImageShape | None = None


def _one_or_several(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


Paths = Annotated[
    tuple[DataPath, ...],
    AfterValidator(_not_empty),  # not `min_length`, because its error message would show the secrets in a URL
    BeforeValidator(_one_or_several),
]


class Text(_Data):
    """Text files or folders of text files, read as bytes (vocabulary 256).

    `{stdlib}` in a path stands for the folder of Python's standard library.

    With `causal`, the task is to predict the next byte. With `masked`, the task is to restore the 15 % of the bytes
    that are hidden (Devlin et al., 2019); token 256 is the mask, so the vocabulary has 257 tokens.
    """

    kind: Literal["text"]
    path: Paths
    context: int = Field(default=128, ge=1)
    objective: Literal["causal", "masked"] = "causal"
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py")  # pattern that selects files of a folder


class Arrays(_Data):
    """Numeric data from a `.npz` file, a `.parquet` file, or a folder of `.npy` files.

    `inputs` and `target` name arrays, columns or files (`x` names x.npy). One or several columns become a float32
    matrix. A Parquet column of lists of equal length counts as several columns. A single array with more dimensions
    keeps its shape, and integers in it become int64. An integer target is a class; any other target is a quantity to
    predict.
    """

    kind: Literal["arrays"]
    path: DataPath
    inputs: str | Annotated[tuple[str, ...], Field(min_length=1)] = "x"
    target: str = "y"


class FileSpec(_Data):
    """Keys of data whose samples are read from files while the run trains.

    Paths and URLs may be globs. Only the index of the files is kept in memory. Remote files are fetched one by one,
    before they are needed.
    """

    path: Paths
    held_out_path: Annotated[Paths | None, BeforeValidator(lambda v: None if v is None else _one_or_several(v))] = None
    format: Literal["jsonl", "lines", "text", "csv", "parquet", "arrow", "tar", "mds", "images"] | None = None
    # number of neighbouring samples that are shuffled together; a batch draws from many such windows
    shuffle_window: int = Field(default=4096, ge=1)
    # what to do with files and rows that cannot be read: stop the run, or count them and train on other rows
    on_bad_shard: Literal["stop", "skip"] = "stop"
    # maximum size of this host's copies of files, in GiB (fetched, decompressed or converted)
    cache_gb: float = Field(default=32.0, gt=0)

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Columns of the files that samples need; empty if they may need all."""
        return ()

    def fetch(self) -> dict[str, str]:
        """Return no environment variables, because shards are fetched while the run trains."""
        return {}

    def _with_paths(self, copy_of: Callable[[str], Path]) -> Self:
        return self


class Records(FileSpec):
    """Rows of JSONL, text, CSV, Parquet, Arrow, WebDataset tars, MosaicML shards (MDS) or folders of images.

    A row is a dict of columns. `columns` selects columns, or renames them (`{new: old}`). `map` names a function that
    turns a row into a sample; it runs in the loader processes. Without `map`, a sample is `(inputs …, target)` if
    `inputs` and `target` name columns, and otherwise a dict of all columns. Columns of bytes are decoded as images,
    resized to cover `shape` and cropped around the centre, as with `kind: images`.
    """

    kind: Literal["records"]
    columns: Annotated[tuple[str, ...], Field(min_length=1)] | dict[str, str] | None = None
    map: str | None = None
    inputs: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    target: str | None = None
    shape: ImageShape | None = None  # by default, the shape that the model needs

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Columns of the files that samples need; empty if they may need all."""
        if self.columns is not None:
            return tuple(self.columns.values() if isinstance(self.columns, dict) else self.columns)
        if self.map is not None or self.inputs is None:
            return ()
        inputs = (self.inputs,) if isinstance(self.inputs, str) else self.inputs
        return inputs if self.target is None else (*inputs, self.target)


class TokenizerSpec(FileSpec):
    """Keys of files that a tokenizer converts."""

    # a tokenizer.json or a Hugging Face folder; by default the folder of the model, if it has a tokenizer
    tokenizer: Path | None = None
    context: int = Field(ge=2)
    pack: bool = False
    _of_model: Path | None = PrivateAttr(None)

    @property
    def is_tokenized(self) -> bool:
        """True: see the base class."""
        return True

    @property
    def tokenizer_file(self) -> Path | None:
        """The key `tokenizer`, or else the tokenizer of the model."""
        return self.tokenizer or self._of_model

    def of_model(self, folder: Path) -> Self:
        """Return a copy that can use the tokenizer in the model's folder."""
        spec = self.model_copy()
        spec._of_model = file if (file := folder / "tokenizer.json").is_file() else None
        return spec


class Tokens(TokenizerSpec):
    """Text of any format that a tokenizer converts, or a folder of tokens from `paceline data tokenize`.

    With `causal`, the task is to predict the next token. With `masked`, the task is to restore the 15 % of the tokens
    that are hidden (Devlin et al., 2019). `limit` and the shares of `held_out` and `test` count documents.

    Text without `pack` is converted by the loader processes. A sample is one document, which is cut at `context`
    tokens. With `pack`, a sample holds several documents, whose positions start again at 0. Text is then converted
    once, into the cache. With `pack` and in a folder of tokens, a longer document becomes several pieces.
    """

    kind: Literal["tokens"]
    column: str = "text"
    objective: Literal["causal", "masked"] = "causal"

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """The column of the text."""
        return (self.column,)

    def fetch(self) -> dict[str, str]:
        """Convert text to tokens if `pack` needs it, unless this host has done it."""
        if self.pack:
            from paceline.job.zoo.tokens import convert_text

            convert_text(self)
        return {}


class TemplateSpec(TokenizerSpec):
    """Keys of files whose rows a chat template converts to text."""

    columns: dict[str, str] = Field(default_factory=dict)  # names of columns in the files: {completion: answer}
    template: Path | None = None  # a file with another chat template
    template_args: Args = Field(default_factory=dict)  # variables of the template, such as {enable_thinking: false}
    date: dates.date = dates.date(2024, 7, 26)  # date that a template gets instead of today's


class Chat(TemplateSpec):
    """Conversations in rows with `messages`, or with `prompt` and `completion`, for supervised fine-tuning.

    Messages are dicts of `role` and `content`, and become text by the chat template of the tokenizer. The columns
    `tools`, `documents` and `chat_template_kwargs` are passed to the template. `conversations` in the form of ShareGPT
    are read too. A prompt and its completion are two texts, to which the end token is added, or two lists of messages.

    The model learns to write the tokens of the assistant's turns, including the token that ends a turn, and no others.
    Longer conversations are cut at `context` tokens. With `pack`, a sample holds several conversations, whose positions
    start again at 0; the files are then converted once, into the cache.
    """

    kind: Literal["chat"]
    # what the model learns to write: all turns of the assistant, only the last one, or all tokens
    train_on: Literal["assistant", "last", "all"] = "assistant"

    def fetch(self) -> dict[str, str]:
        """Convert conversations to tokens if `pack` needs it, unless this host has done it."""
        if self.pack:
            from paceline.job.zoo.chat import convert_chats

            convert_chats(self)
        return {}


class Preferences(TemplateSpec):
    """Pairs of a chosen and a rejected completion, in rows with `prompt`, `chosen` and `rejected`.

    Each is a text, or a list of messages, which the tokenizer's chat template converts to text. Without `prompt`, the
    prompt is the common beginning of `chosen` and `rejected`. Only tokens of the completions count in the loss. A
    sample is a pair, and each of its sequences is cut at `context` tokens.
    """

    kind: Literal["preferences"]

    @field_validator("pack", mode="after")
    @classmethod
    def _not_packed(cls, value: bool) -> bool:
        if value:
            raise InvalidValue(
                "data.pairs_packed", "preferences cannot be packed, because each pair is one sample. Remove pack."
            )
        return value


class Stage(Spec):
    """Weights of the sources of a mixture from a step on."""

    step: int = Field(ge=1)
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class Mixture(_Data):
    """Samples of several sources, drawn by weight; `sources` maps names to data of other kinds.

    A batch has samples of all sources in proportion to `weights`; `schedule` changes the weights at later steps. An
    epoch has as many samples as all sources together, each counted `repeat` times. Without weights, an epoch has each
    sample `repeat` times. A source that ends begins again, in another order. Each source has its own `held_out` and
    `limit`.
    """

    kind: Literal["mixture"]
    sources: Annotated[dict[str, Annotated[Records | Tokens | Chat, Field(discriminator="kind")]], Field(min_length=1)]
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    repeat: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    schedule: tuple[Stage, ...] = ()

    @property
    def is_tokenized(self) -> bool:
        """True if a source has tokens; see `Tokens`."""
        return any(source.is_tokenized for source in self.sources.values())

    def of_model(self, folder: Path) -> Self:
        """Return a copy whose sources use the tokenizer in the model's folder."""
        return self.model_copy(
            update={"sources": {name: source.of_model(folder) for name, source in self.sources.items()}}
        )

    def fetch(self) -> dict[str, str]:
        """Prepare each source; see `Tokens.fetch`."""
        for source in self.sources.values():
            source.fetch()
        return {}

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        named = [self.weights or {}, self.repeat, *(stage.weights for stage in self.schedule)]
        for name in (name for weights in named for name in weights):
            if name not in self.sources:
                raise InvalidValue(
                    "data.source_unknown",
                    "there is no source {name}. {hint}",
                    name=name,
                    hint=nearest(name, self.sources),
                )
        for weights in (named[0], *named[2:]):
            if weights and not sum(weights.values()):
                raise InvalidValue("data.weights_zero", "the weights of the sources are all 0. Make one positive.")
        steps = [stage.step for stage in self.schedule]
        if sorted(set(steps)) != steps:
            raise InvalidValue("data.schedule_order", "the steps of data.schedule must increase")
        for name, source in self.sources.items():
            for key in ("num_workers", "collate", "collate_held_out"):
                if getattr(source, key):
                    raise InvalidValue(
                        "data.key_of_mixture",
                        "data.sources.{name}: {key} belongs to the mixture, because a batch has samples of several "
                        "sources. Set data.{key}.",
                        name=name,
                        key=key,
                    )
        sizes = {source.cache_gb for source in self.sources.values()}
        if len(sizes) > 1:
            raise InvalidValue(
                "data.caches_differ",
                "the sources share one cache, but have different values of cache_gb: {values}. Give all sources the "
                "same value.",
                values=sorted(sizes),
            )
        for key in ("held_out", "test", "limit"):
            if getattr(self, key) not in (type(self).model_fields[key].default, 0):
                raise InvalidValue(
                    "data.key_of_sources",
                    "a mixture has no {key} of its own. Set {key} in its sources.",
                    key=key,
                )
        return self

    @property
    def keeps_no_validation_set(self) -> bool:
        """Return True if no source has a validation set."""
        return all(source.keeps_no_validation_set for source in self.sources.values())

    @classmethod
    def resolved(cls, source: str, context: Mapping[str, Any] | None = None) -> str:
        """Refuse other sources, because the files of a mixture are those of its sources."""
        raise InvalidValue(
            "data.mixture_of_other_source",
            "a mixture has only the sets of its sources. Set test in the sources, or choose train, held_out or test.",
        )


class _Made(_Data):
    """Data that a factory returns.

    `factory` is the import path of a callable, which gets `args` as keyword arguments. `held_out_factory` makes the
    validation set from the same `args`.
    """

    factory: str
    args: Args = Field(default_factory=dict)
    held_out_factory: str | None = None


class Custom(_Made):
    """Any map-style `torch.utils.data.Dataset`.

    Without `held_out_factory`, a share of the samples is held out.
    """

    kind: Literal["dataset"]


class Streamed(_Made):
    """Any `torch.utils.data.IterableDataset`.

    The data set is read in `parts`, which data-parallel ranks and loader processes divide among themselves. By default,
    a data set with `shard` has as many parts as files, or 60, and a data set that uses `get_worker_info` has one part
    for each process that reads.
    """

    kind: Literal["iterable"]
    held_out: float = Field(default=0.0, ge=0, lt=1)
    parts: int | None = Field(default=None, ge=1)

    @field_validator("held_out", "test", mode="after")
    @classmethod
    def _no_share(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, float) and value:
            raise InvalidValue(
                "data.share_of_stream",
                "{key} is {value:g}, but a share of a stream cannot be held out, because its samples are not known "
                "before they are read. {instead}",
                key=info.field_name,
                value=value,
                instead="Name a held_out_factory."
                if info.field_name == "held_out"
                else "Name the import path of a factory.",
            )
        return value


class Synthetic(_Data):
    """Generated data for benchmarks. Every figure labels its results as synthetic.

    Set `classes` for images and vectors, or `vocab` for token sequences.
    """

    kind: Literal["synthetic"]
    samples: int = Field(default=10_000, ge=1)
    shape: tuple[PositiveInt, ...] | None = None  # shape of one sample; (sequence length,) with `vocab`
    classes: int = Field(default=10, ge=2)
    vocab: int | None = Field(default=None, ge=2)


DataSpec = Annotated[
    Annotated[
        Digits
        | Cifar10
        | Images
        | Text
        | Arrays
        | Records
        | Tokens
        | Chat
        | Preferences
        | Mixture
        | Custom
        | Streamed
        | Synthetic,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_Data.long_form),
]


def _expand(path: Path, base: Path) -> Path:
    import sysconfig

    text = str(path).replace("{stdlib}", sysconfig.get_path("stdlib"))
    return Path(base) / Path(text).expanduser()
