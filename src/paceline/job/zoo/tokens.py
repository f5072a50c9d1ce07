"""Data sets of tokens: documents as sequences of equal length, with labels."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.corpus.conversion import text_of, tokenize
from paceline.corpus.host_files import shared_folder, user_cache
from paceline.corpus.packing import Packing
from paceline.corpus.rows import Damaged
from paceline.corpus.shards import Corpus, Where
from paceline.corpus.tokenizer import Tokenizer
from paceline.corpus.tokens import (
    COLUMN,
    DESCRIPTION,
    LENGTHS,
    TRAINED,
    TokensAbout,
    is_folder_of_tokens,
    read_about,
)
from paceline.errors import DataError, StorageError
from paceline.job.samples import Columns, DataSets
from paceline.job.zoo.arrays import IGNORED, hide, sample_keys
from paceline.job.zoo.records import ShardedSamples, Spans, host_files, opened, sharded_sets
from paceline.storage.url import is_url
from paceline.units import large

if TYPE_CHECKING:
    from paceline.corpus.chat import ChatForm
    from paceline.job.data import Chat, TemplateSpec, TokenizerSpec, Tokens

_DESCRIPTION_BYTES = 1 << 30  # largest tokens.json
_LINE_EVERY_S = 10.0  # between lines of progress


def build_tokens(spec: Tokens, seed: int) -> DataSets:
    """Open text or folders of tokens. Only their indexes and one document are read.

    Raises:
        DataError: the files or the tokenizer cannot be used, or the tokenizer has no token that the objective needs.
    """
    if is_text := not _is_tokens(spec):
        tokenizer: Tokenizer | None = tokenizer_of(spec)
    else:
        tokenizer = None if spec.tokenizer is None else Tokenizer.load(spec.tokenizer)
    spec = convert_text(spec, tokenizer)
    if is_text and not spec.pack:
        assert tokenizer is not None
        form = SequenceForm(spec, tokenizer, tokenizer.sha256, seed)
        return sharded_sets(spec, lambda corpus, spans: TextSamples(corpus, spans, spec, form, tokenizer))
    folders = Folders(spec, tokenizer)
    form = SequenceForm(spec, folders.first, folders.first.tokenizer_sha256, seed)
    arrow = spec.model_copy(update={"format": "arrow"})
    return sharded_sets(arrow, lambda corpus, spans: TokenSamples(corpus, spans, spec, form, folders, tokenizer))


def convert_text(spec: Tokens, tokenizer: Tokenizer | None = None) -> Tokens:
    """Convert text to a folder of tokens in the cache, if `pack` is set.

    Returns:
        A spec that names the folders of tokens; `spec` itself if nothing has to be converted.

    Raises:
        DataError: the spec has no tokenizer, or names both text and folders of tokens; see also `tokenize`.
    """
    if _is_tokens(spec):
        return spec
    if not spec.pack:
        return spec
    tokenizer = tokenizer or tokenizer_of(spec)
    made: Tokens = with_folders(spec, lambda paths: converted(spec, tokenizer, paths, spec.column))
    return made


def tokenizer_of(spec: Tokens | TemplateSpec) -> Tokenizer:
    """Load the tokenizer of a spec that names text.

    Raises:
        DataError: the spec names no tokenizer, and the model has none; see also `Tokenizer.load`.
    """
    if spec.tokenizer_file is None:
        raise DataError(
            "data.no_tokenizer",
            "{path} is text, which needs a tokenizer. Set data.tokenizer to a tokenizer.json or a Hugging Face folder, "
            "or read the text as bytes with kind: text.",
            path=", ".join(map(str, spec.path)),
        )
    return Tokenizer.load(spec.tokenizer_file)


def with_folders(spec: TokenizerSpec, convert: Callable[[Sequence[Path | str]], Path]) -> Any:
    """Return a spec that names the folders of tokens into which `convert` converts its sources."""
    held_out = None if spec.held_out_path is None else (convert(spec.held_out_path),)
    test = str(convert((spec.test,))) if isinstance(spec.test, str) else spec.test
    return spec.model_copy(update={"path": (convert(spec.path),), "held_out_path": held_out, "test": test})


def converted(
    spec: TokenizerSpec, tokenizer: Tokenizer, paths: Sequence[Path | str], column: str, turns: ChatForm | None = None
) -> Path:
    """Convert files to a folder of tokens in the cache; see `tokenize`."""
    corpus = opened(spec, paths)
    # If a file changes, its tokens go to a new folder, because a running job may use the old one.
    files = "\n".join(f"{shard.name} {shard.version} {shard.digest}" for shard in corpus.shards)
    key = f"{files}\n{corpus.format.name}\n{column}\n{tokenizer.sha256 if turns is None else turns.sha256}"
    if skips := spec.on_bad_shard == "skip":
        key += "\nskip"
    printed_at = time.monotonic()

    def progress(rows: int, tokens: int) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= _LINE_EVERY_S:
            printed_at = time.monotonic()
            text = f"converting text to tokens: {rows:,} of {len(corpus):,} rows, {large(tokens)} tokens"
            print(text, file=sys.stderr, flush=True)

    def make(folder: Path) -> None:
        about = tokenize(
            corpus, column, tokenizer, folder, progress=progress, wait=True, turns=turns, skips_bad_rows=skips
        )
        if about.empty:
            print(f"left out {about.empty:,} of {len(corpus):,} rows, in which nothing can be trained", file=sys.stderr)

    return shared_folder(user_cache("tokens"), key, int(spec.cache_gb * 2**30), make)


def _is_tokens(spec: Tokens) -> bool:
    """Return True if a spec names folders of tokens instead of text."""
    places = [*spec.path, *(spec.held_out_path or ()), *([spec.test] if isinstance(spec.test, str) else ())]
    found = {str(place): _is_folder(str(place)) for place in places} if spec.format in (None, "arrow") else {}
    if len(set(found.values())) == 2:
        raise DataError(
            "data.text_and_tokens",
            "{tokens} is a folder of tokens, but {text} is text. Convert all text with `paceline data tokenize`.",
            tokens=next(place for place, is_tokens in found.items() if is_tokens),
            text=next(place for place, is_tokens in found.items() if not is_tokens),
        )
    return any(found.values())


def _is_folder(place: str) -> bool:
    if not is_url(place):
        return is_folder_of_tokens(Path(place))
    from paceline.storage.store import Store

    return "*" not in place and Store(place).about(DESCRIPTION) is not None


class Ids(Protocol):
    """Ids that a `SequenceForm` needs from a tokenizer or a folder of tokens."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_token_id(self) -> int: ...
    @property
    def pad_token_id(self) -> int: ...
    @property
    def mask_token_id(self) -> int | None: ...


class Folders:
    """The folders of tokens that a spec names: descriptions and lengths of documents.

    Attributes:
        first: description of the folder that `path` names first.
    """

    def __init__(self, spec: Tokens | TemplateSpec, tokenizer: Tokenizer | None) -> None:
        self._cache, self._tokenizer = host_files(spec), tokenizer
        self._known: dict[str, tuple[TokensAbout, dict[str, NDArray[np.uint32]]]] = {}
        self.first = self._of(str(spec.path[0]))[0]

    def lengths(self, corpus: Corpus) -> list[NDArray[np.uint32]]:
        """Return the number of tokens of each document, one array per file of the corpus."""
        found = []
        for shard in corpus.shards:
            folder, _, name = shard.name.rpartition("/")
            lengths = self._of(folder)[1]
            if len(lengths.get(name, ())) != shard.rows:
                raise DataError(
                    "data.not_of_folder",
                    "{shard} is not the file that {folder}/tokens.json describes. Run `paceline data tokenize` again, "
                    "or copy the whole folder again.",
                    shard=shard.name,
                    folder=folder,
                )
            found.append(lengths[name])
        return found

    def _of(self, folder: str) -> tuple[TokensAbout, dict[str, NDArray[np.uint32]]]:
        if folder not in self._known:
            about, lengths = self._read(folder)
            if self._tokenizer is not None:
                about.must_be_of(self._tokenizer, folder)
            elif self._known and about.tokenizer_sha256 != self.first.tokenizer_sha256:
                raise DataError(
                    "data.folders_differ",
                    "{folder} was made with the tokenizer {tokenizer}, but other folders of this data were made with "
                    "{other}. Convert all text with one tokenizer.",
                    folder=folder,
                    tokenizer=about.tokenizer,
                    other=self.first.tokenizer,
                )
            bounds = np.cumsum([0, *(part.documents for part in about.parts)])
            named = {
                part.name: lengths[first:end]
                for part, first, end in zip(about.parts, bounds[:-1], bounds[1:], strict=True)
            }
            self._known[folder] = about, named
        return self._known[folder]

    def _read(self, folder: str) -> tuple[TokensAbout, NDArray[np.uint32]]:
        load = partial(_lengths, folder)
        if not is_url(folder):
            return read_about(Path(folder)), load(Path(folder, LENGTHS))
        from paceline.storage.store import Store

        store = Store(folder)
        content, entry = store.read(DESCRIPTION, _DESCRIPTION_BYTES), store.about(LENGTHS)
        if content is None or entry is None:
            absent = f"{folder}/{LENGTHS if content else DESCRIPTION}"
            raise StorageError("storage.object_absent", "{url}: no such object", url=absent, absent=True)
        about = TokensAbout.from_json(content, f"{folder}/{DESCRIPTION}")
        key = f"lengths of tokens\n{folder}\n{entry.version}"
        return about, self._cache.opened(key, lambda file: _fetch(store, file), load)


def _lengths(folder: str, file: Path) -> NDArray[np.uint32]:
    try:
        lengths: NDArray[np.uint32] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        if isinstance(error, FileNotFoundError) and is_url(folder):
            raise  # another process has deleted the copy
        raise DataError(
            "data.lengths_unreadable",
            "{folder}/lengths.npy cannot be read: {reason}. Run `paceline data tokenize` again, or copy the whole "
            "folder again.",
            folder=folder,
            reason=getattr(error, "strerror", None) or error,
        ) from error
    return lengths


def _fetch(store: Any, file: Path) -> None:
    store.fetch(LENGTHS, file)


class Excerpt(NamedTuple):
    """Tokens of a document that a sample holds.

    Attributes:
        tokens: the tokens, followed by the next token of the document if there is one.
        length: number of tokens without this next token.
        trained: True for tokens that the model learns to predict, one entry for each of the tokens; None for all.
    """

    tokens: NDArray[np.int32] | list[int]
    length: int
    trained: NDArray[np.bool_] | None = None


class Contents(NamedTuple):
    """Excerpts that fill a sample.

    Attributes:
        number: number of the sample, which selects the hidden tokens of a masked sample.
    """

    number: int
    excerpts: Sequence[Excerpt]


class SequenceForm:
    """Conversion of excerpts of documents to samples of `context` positions.

    All tensors are int64. The tensors of a sample have the shape (context,). A causal sample is `(input, target)`, in
    which the target is the next token. A packed sample, causal or masked, is a dict of `input_ids`, `position_ids` and
    `labels`. A masked sample without packing is a dict of `input_ids`, `labels` and `attention_mask`, which excludes
    the padding. The last token of a document has no next token, so its causal label is -100, as for padding.

    Attributes:
        meaning: settings that samples must share to be in one batch, by name.
    """

    def __init__(self, spec: Tokens | TemplateSpec, ids: Ids, tokenizer: str, seed: int) -> None:
        objective = getattr(spec, "objective", "causal")
        self.context, self.packed, self.causal = spec.context, spec.pack, objective == "causal"
        self.meaning = {"tokenizer": tokenizer, "context": spec.context, "objective": objective, "pack": spec.pack}
        self.seed, self.epoch = seed, 0
        self.vocab_size, self.pad, self.end, self._mask = (
            ids.vocab_size,
            ids.pad_token_id,
            ids.end_token_id,
            ids.mask_token_id,
        )
        if not self.causal and self._mask is None:
            raise DataError(
                "data.no_mask_token",
                'objective: masked needs a mask token, but the tokenizer has none. Add the key "mask_token" to its '
                "tokenizer_config.json, with a token of the vocabulary.",
            )
        self._positions = np.arange(spec.context)

    def batch(self, sequences: Sequence[Contents], counts: dict[str, int]) -> Columns:
        """Return a batch, and add its numbers of tokens to `counts`.

        Args:
            counts: receives `tokens` (labels that count), `padding` and `positions`.
        """
        shape = len(sequences), self.context
        ids, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.empty(shape, np.int64) if self.packed else None
        ends = []
        for row, (_, excerpts) in enumerate(sequences):
            at = 0
            for tokens, length, trained in excerpts:
                first, at = at, at + length
                ids[row, first:at] = tokens[:length]
                labels[row, first : at - 1] = ids[row, first + 1 : at]
                if len(tokens) > length:
                    labels[row, at - 1] = tokens[length]
                if trained is not None:
                    labels[row, first : first + len(trained) - 1][~trained[1:]] = IGNORED
                if positions is not None:
                    positions[row, first:at] = self._positions[:length]
            if positions is not None:
                positions[row, at:] = self._positions[: self.context - at]
            ends.append(at)
        used = self._positions < np.array(ends)[:, None]
        if not self.causal:
            assert self._mask is not None
            keys = sample_keys(self.seed, self.epoch, [number for number, _ in sequences])
            may_hide = used & (ids != self.end)
            ids, labels = hide(ids, keys, mask=self._mask, vocab=self.vocab_size, may_hide=may_hide)
        for name, number in (
            ("tokens", int(np.count_nonzero(labels != IGNORED))),
            ("padding", ids.size - sum(ends)),
            ("positions", ids.size),
        ):
            counts[name] = counts.get(name, 0) + number
        columns = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if positions is not None:
            return Columns({**columns, "position_ids": torch.from_numpy(positions)})
        if self.causal:
            return Columns((columns["input_ids"], columns["labels"]))
        return Columns({**columns, "attention_mask": torch.from_numpy(used.astype(np.int64))})


class Sequences(ShardedSamples):
    """Samples that a `SequenceForm` creates.

    Attributes:
        packed: whether a sample may hold several documents.
        pads_at_end: whether positions after the last label that counts change nothing, so they need no computing.
    """

    labels = None

    def __init__(self, corpus: Corpus, spans: Spans, spec: Tokens | TemplateSpec, form: SequenceForm) -> None:
        super().__init__(corpus, spans, spec)
        self.form, self.packed = form, form.packed
        self.pads_at_end = form.causal and not form.packed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the hidden tokens of masked samples."""
        self.form.epoch = epoch

    def alone(self, sample: Any) -> Any:
        """Return a sample that is not part of a batch, and add to `counts`."""
        columns = self.form.batch([sample], self.counts).values
        if isinstance(columns, dict):
            return {name: column[0] for name, column in columns.items()}
        return tuple(column[0] for column in columns)

    def batch(self, samples: list[Any]) -> Any:
        """Return a batch, and add to `counts`."""
        return self.form.batch(samples, self.counts)

    def count_cut(self, *lengths: int) -> None:
        """Add the tokens that one sample loses to `counts`, as `cut` and `shortened`.

        Args:
            lengths: numbers of tokens of the sample's sequences.
        """
        cut = sum(max(0, length - self.form.context) for length in lengths)
        if cut:
            for name, number in (("cut", cut), ("shortened", 1)):
                self.counts[name] = self.counts.get(name, 0) + number


class TextSamples(Sequences):
    """Documents of text, converted to tokens when they are read.

    Attributes:
        tokenizer: the tokenizer that the spec names.
    """

    def __init__(self, corpus: Corpus, spans: Spans, spec: Tokens, form: SequenceForm, tokenizer: Tokenizer) -> None:
        super().__init__(corpus, spans, spec, form)
        self.tokenizer, self._column = tokenizer, spec.column

    def read(self, index: int, shard: int) -> Contents:
        """Read a document as tokens."""
        row = int(self._firsts[shard] + index - self.starts[shard])
        tokens = self.tokenizer.ids(text_of(self.corpus.row(row), self._column, Where(self.corpus, row)))
        self.count_cut(len(tokens) - self.form.causal)
        return Contents(index, [Excerpt(tokens[: self.form.context + 1], min(len(tokens), self.form.context))])

    @property
    def digest(self) -> list[int]:
        """Numbers that change with the files or with the tokenizer."""
        return [*super().digest, int(self.tokenizer.sha256[:12], 16)]


class TokenSamples(Sequences):
    """Documents of folders of tokens; a sample is one piece, or several packed pieces.

    Attributes:
        tokenizer: the tokenizer, to show samples as text; None if the spec does not name it.
    """

    def __init__(
        self,
        corpus: Corpus,
        spans: Spans,
        spec: Tokens | Chat,
        form: SequenceForm,
        folders: Folders,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(corpus, spans, spec, form)
        self.tokenizer = tokenizer
        # first document of each shard, in the numbering of the packing
        self._documents = self.starts
        self._packing = _packing(corpus, spans, spec, folders)
        self.starts = self._packing.groups

    def read(self, index: int, shard: int) -> Contents:
        """Read a sequence of one or several documents."""
        excerpts = []
        first_row = int(self._firsts[shard] - self._documents[shard])
        for document, first, length in self._packing.pieces(index):
            row = first_row + document
            columns = self.corpus.row(row)
            tokens, trained = columns[COLUMN][first : first + length + 1], columns.get(TRAINED)
            self._check(tokens, length, row)
            if trained is not None:
                self.count_cut(len(columns[COLUMN]))
                trained = trained[:length].astype(np.bool_)
            excerpts.append(Excerpt(tokens if trained is None else tokens[:length], length, trained))
        return Contents(index, excerpts)

    def _check(self, tokens: NDArray[np.int32], length: int, row: int) -> None:
        # a piece that is shorter than the context ends its document
        if len(tokens) < length or (length < self.form.context and len(tokens) > length):
            where = Where(self.corpus, row)
            raise Damaged(str(where), None, "the number of tokens of the document differs from lengths.npy")
        # read as unsigned, negative numbers are too large as well
        largest = int(tokens.view(np.uint32).max())
        if largest >= self.form.vocab_size:
            raise DataError(
                "data.token_beyond_vocabulary",
                "{where}: the document has the token {token}, but the vocabulary has only the ids 0 to {last}. Run "
                "`paceline data tokenize` again.",
                where=Where(self.corpus, row),
                token=int(tokens[tokens.view(np.uint32).argmax()]),
                last=self.form.vocab_size - 1,
            )


def _packing(corpus: Corpus, spans: Spans, spec: Tokens | Chat, folders: Folders) -> Packing:
    """Return the packing of a set, which the processes of this host share."""
    lengths = [
        of_shard[first:][:number]
        for of_shard, first, number in zip(
            folders.lengths(corpus), (spans.firsts - corpus.starts[:-1]).tolist(), spans.counts.tolist(), strict=True
        )
    ]
    if spec.kind == "chat":  # a conversation is cut, because the rest of it would begin in the middle of a turn
        lengths = [np.minimum(of_shard, spec.context) for of_shard in lengths]
    if not sum(map(len, lengths)):
        return Packing.of([], spec.context, join=spec.pack)
    rows = hashlib.sha256(spans.firsts.tobytes() + spans.counts.tobytes()).hexdigest()
    key = f"packing\n{corpus.digest}\n{rows}\n{spec.context} {spec.pack}"

    def make(file: Path) -> None:
        Packing.of(lengths, spec.context, join=spec.pack).save(file)

    return host_files(spec).opened(key, make, Packing.load)
