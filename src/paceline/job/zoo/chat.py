"""Data sets of conversations and preferences: tokens of the assistant as labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.corpus.chat import ChatForm, Turns
from paceline.corpus.shards import Corpus, Where
from paceline.errors import DataError
from paceline.job.samples import Columns, DataSets
from paceline.job.zoo.records import Spans, sharded_sets
from paceline.job.zoo.tokens import (
    Contents,
    Excerpt,
    Folders,
    SequenceForm,
    Sequences,
    TokenSamples,
    converted,
    tokenizer_of,
    with_folders,
)

if TYPE_CHECKING:
    from paceline.job.data import Chat, Preferences, TemplateSpec


def build_chat(spec: Chat, seed: int) -> DataSets:
    """Open files of conversations. Only their indexes and one conversation are read.

    Raises:
        DataError: the files, the tokenizer or the chat template cannot be used, or the first row has no conversation.
    """
    chats = chat_form(spec)
    if spec.pack:
        packed = convert_chats(spec, chats)
        folders = Folders(packed, None)
        form = SequenceForm(spec, folders.first, chats.tokenizer.sha256, seed)
        arrow = packed.model_copy(update={"format": "arrow"})
        return sharded_sets(
            arrow, lambda corpus, spans: TokenSamples(corpus, spans, spec, form, folders, chats.tokenizer)
        )
    form = SequenceForm(spec, chats.tokenizer, chats.tokenizer.sha256, seed)
    return sharded_sets(spec, lambda corpus, spans: ChatSamples(corpus, spans, spec, form, chats))


def convert_chats(spec: Chat, chats: ChatForm | None = None) -> Chat:
    """Convert conversations to folders of tokens, and return a spec of these folders."""
    form = chats or chat_form(spec)
    made: Chat = with_folders(spec, lambda paths: converted(spec, form.tokenizer, paths, "messages", form))
    return made


def build_preferences(spec: Preferences, seed: int) -> DataSets:
    """Open files of preferences. Only their indexes and one pair are read.

    Raises:
        DataError: the files, the tokenizer or the chat template cannot be used, or the first row has no pair.
    """
    chats = chat_form(spec)
    form = SequenceForm(spec, chats.tokenizer, chats.sha256, seed)
    return sharded_sets(spec, lambda corpus, spans: PreferenceSamples(corpus, spans, spec, form, chats))


def chat_form(spec: TemplateSpec) -> ChatForm:
    """Load the tokenizer and the chat template of a spec."""
    return ChatForm.load(
        tokenizer_of(spec),
        spec.template,
        spec.date,
        train_on=getattr(spec, "train_on", "assistant"),
        arguments=spec.template_args,
        columns=spec.columns,
    )


class TemplateSamples(Sequences):
    """Rows that a chat template converts when they are read.

    Attributes:
        tokenizer: the tokenizer that the spec names.
    """

    refusals = (DataError,)

    def __init__(self, corpus: Corpus, spans: Spans, spec: TemplateSpec, form: SequenceForm, chats: ChatForm) -> None:
        super().__init__(corpus, spans, spec, form)
        self.tokenizer, self._chats = chats.tokenizer, chats

    @property
    def digest(self) -> list[int]:
        """Numbers that change with the files, the tokenizer or the template."""
        return [*super().digest, int(self._chats.sha256[:12], 16)]

    def cut(self, index: int, *turns: Turns) -> list[Contents]:
        """Return sequences of at most `context` tokens.

        `counts` receives the cut tokens. A sample with a sequence without a label that counts is `untrained`.
        """
        most = self.form.context
        self.count_cut(*(len(tokens) for tokens, _ in turns))
        if not all(trained[1:most].any() for _, trained in turns):
            self.counts["untrained"] = self.counts.get("untrained", 0) + 1
        return [Contents(index, [Excerpt(t[:most], min(len(t), most), trained[:most])]) for t, trained in turns]


class ChatSamples(TemplateSamples):
    """Conversations that are converted to tokens when they are read."""

    def read(self, index: int, shard: int) -> Contents:
        """Read a conversation as tokens."""
        row = int(self._firsts[shard] + index - self.starts[shard])
        return self.cut(index, self._chats(self.corpus.row(row), Where(self.corpus, row)))[0]


class PreferenceSamples(TemplateSamples):
    """Pairs that are converted to tokens when they are read, the chosen sequence first.

    A sample is `(input, target)` of shape (2, context) each.
    """

    def read(self, index: int, shard: int) -> list[Contents]:
        """Read a pair as tokens."""
        row = int(self._firsts[shard] + index - self.starts[shard])
        return self.cut(index, *self._chats.pair(self.corpus.row(row), Where(self.corpus, row)))

    def alone(self, sample: list[Contents]) -> Any:
        """Return a pair that is not part of a batch, and add to `counts`."""
        return self.form.batch(sample, self.counts).values

    def batch(self, samples: list[list[Contents]]) -> Any:
        """Return a batch of pairs, and add to `counts`."""
        found = self.form.batch([sequence for pair in samples for sequence in pair], self.counts).values
        assert isinstance(found, tuple), "pairs are not packed"
        return Columns(tuple(column.unflatten(0, (-1, 2)) for column in found))
