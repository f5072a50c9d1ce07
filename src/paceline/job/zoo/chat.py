"""Data sets of conversations: tokens of the assistant as labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.corpus.chat import ChatForm
from paceline.corpus.shards import Corpus, Where
from paceline.job.samples import DataSets
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
    from paceline.job.data import Chat


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


def chat_form(spec: Chat) -> ChatForm:
    """Load the tokenizer and the chat template of a spec."""
    return ChatForm.load(
        tokenizer_of(spec),
        spec.template,
        spec.date,
        train_on=spec.train_on,
        arguments=spec.template_args,
        columns=spec.columns,
    )


class ChatSamples(Sequences):
    """Conversations that are converted to tokens when they are read.

    Attributes:
        tokenizer: the tokenizer that the spec names.
    """

    def __init__(self, corpus: Corpus, spans: Spans, spec: Chat, form: SequenceForm, chats: ChatForm) -> None:
        super().__init__(corpus, spans, spec, form)
        self.tokenizer, self._chats = chats.tokenizer, chats

    def read(self, index: int, shard: int) -> Contents:
        """Read a conversation as tokens.

        `counts` receives the number of tokens cut off (`cut`), and of samples without a label that counts
        (`untrained`).
        """
        row = int(self._firsts[shard] + index - self.starts[shard])
        tokens, trained = self._chats(self.corpus.row(row), Where(self.corpus, row))
        most = self.form.context
        for name, number in (
            ("cut", max(0, len(tokens) - most)),
            ("untrained", int(not trained[1:most].any())),
        ):
            if number:
                self.counts[name] = self.counts.get(name, 0) + number
        return Contents(index, [Excerpt(tokens[:most], min(len(tokens), most), trained[:most])])

    @property
    def digest(self) -> list[int]:
        """Numbers that change with the files, the tokenizer or the template."""
        return [*super().digest, int(self._chats.sha256[:12], 16)]
