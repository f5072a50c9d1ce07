"""Conversion of conversations to tokens by a tokenizer's chat template.

Templates are third-party Jinja programs. transformers renders them in a sandbox without access to the interpreter.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.corpus.shards import Where
from paceline.corpus.tokenizer import Tokenizer, special_tokens
from paceline.errors import DataError
from paceline.extensions import optional_package

TrainOn = Literal["assistant", "last", "all"]
Messages = list[dict[str, Any]]

_FILE, _CONFIG, _KEY = "chat_template.jinja", "tokenizer_config.json", "chat_template"
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EXTRAS = ("tools", "documents", "chat_template_kwargs")
_NOW = re.compile(r"""strftime_now\s*\(\s*(['"])(.*?)\1\s*\)""")
_ROLES = {  # role in ShareGPT's format: role in chat templates
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_PROMPT: Any = "the prompt"  # stands for `Where` if messages are not from a file
_OTHER_TEMPLATE = (
    "Set data.template to a template with {% generation %} markers around the assistant's turns, or train_on: all"
)


class Turns(NamedTuple):
    """A conversation as tokens.

    Attributes:
        tokens: token ids, int32, shape (tokens,).
        trained: True for tokens that the model learns to write, shape (tokens,).
    """

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]


@dataclass(frozen=True)
class ChatForm:
    """Conversion of rows with conversations to tokens.

    Attributes:
        tokenizer: the tokenizer.
        template: the Jinja source of the chat template; None if only plain prompts and completions can be read.
        train_on: tokens that count in the loss: those of all turns of the assistant, of the last one, or all tokens.
        arguments: variables of the template, such as `eos_token`.
        columns: names of columns in the files, by their standard names such as `prompt`.
    """

    tokenizer: Tokenizer
    template: str | None
    train_on: TrainOn = "assistant"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, tokenizer: Tokenizer, template: Path | None, date: date, **settings: Any) -> ChatForm:
        """Read the chat template of a tokenizer's folder, or the file `template`.

        Args:
            date: date that the template gets instead of today's, so that every start makes the same tokens.

        Raises:
            DataError: the template cannot be read, is invalid, or its text differs from one start to the next.
        """
        source = _template_of(tokenizer.path.parent) if template is None else _read(template).decode()
        if source is not None:
            source = _reproducible(source, date, template or tokenizer.path.parent)
        arguments = special_tokens(tokenizer.path.parent) | dict(settings.pop("arguments", {}))
        return cls(tokenizer, source, arguments=arguments, **settings)

    @property
    def sha256(self) -> str:
        """Hash of all settings that determine the tokens."""
        settings = [self.tokenizer.sha256, self.template, self.train_on, dict(self.arguments)]
        return hashlib.sha256(json.dumps([*settings, dict(self.columns)], sort_keys=True).encode()).hexdigest()

    def __call__(self, row: Mapping[str, Any], where: Where) -> Turns:
        """Convert a row; errors name `where`.

        A row has `messages`, or `prompt` and `completion`. Messages are dicts of `role` and `content`; the keys `from`
        and `value` of ShareGPT are read too. The columns `tools`, `documents` and `chat_template_kwargs` are passed to
        the template.

        Raises:
            DataError: the row has no conversation, the template refuses the conversation, or the template does not
                show which tokens are the assistant's.
        """
        row = {**row, **{name: row[column] for name, column in self.columns.items() if column in row}}
        name = next((name for name in ("messages", "conversations") if row.get(name) is not None), None)
        if name is not None:
            return self._conversation(_messages(row[name], name, where), _extras(row, where), where)
        if any(row.get(name) is None for name in ("prompt", "completion")):
            raise DataError(
                "data.no_conversation",
                "{where}: this row has the columns {columns}, but kind: chat needs messages, or prompt and completion. "
                "Name them with data.columns, e.g. {{prompt: question, completion: answer}}.",
                where=where,
                columns=[name for name, value in row.items() if value is not None],
            )
        prompt, completion = (_text_or_messages(row[name]) for name in ("prompt", "completion"))
        return self._completed(prompt, completion, "completion", row, where)

    def pair(self, row: Mapping[str, Any], where: Where) -> tuple[Turns, Turns]:
        """Convert a row with `prompt`, `chosen` and `rejected` to the two completed sequences.

        Without `prompt`, the prompt is the common beginning of `chosen` and `rejected`. The same holds if `prompt` is a
        text, and both `chosen` and `rejected` begin with a message of this text.

        Raises:
            DataError: the row has no pair, or the template refuses it; see `__call__`.
        """
        row = {**row, **{name: row[column] for name, column in self.columns.items() if column in row}}
        if any(row.get(name) is None for name in ("chosen", "rejected")):
            raise DataError(
                "data.no_preference",
                "{where}: this row has the columns {columns}, but kind: preferences needs chosen and rejected. Name "
                "them with data.columns, e.g. {{chosen: better, rejected: worse}}.",
                where=where,
                columns=[name for name, value in row.items() if value is not None],
            )
        chosen, rejected = (_text_or_messages(row[name]) for name in ("chosen", "rejected"))
        prompt = None if row.get("prompt") is None else _text_or_messages(row["prompt"])
        if isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
            repeated = chosen[:1] == rejected[:1] and _content(chosen[0]) == prompt
            prompt = None if repeated else [{"role": "user", "content": prompt}]
        if prompt is None:
            shared = _common(chosen, rejected, where)
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        return (
            self._completed(prompt, chosen, "chosen", row, where),
            self._completed(prompt, rejected, "rejected", row, where),
        )

    def _completed(self, prompt: Any, completion: Any, name: str, row: Mapping[str, Any], where: Where) -> Turns:
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._text_pair(prompt, completion, where)
        pair = _messages(prompt, "prompt", where), _messages(completion, name, where)
        return self._pair(*pair, _extras(row, where), where)

    def prompt(self, messages: Messages) -> list[int]:
        """Convert a conversation to tokens, up to the beginning of the assistant's answer."""
        text, _ = self._render(messages, {}, _PROMPT, prompt=True)
        return self.tokenizer.ids(text, end=False)

    @property
    def end_of_turn(self) -> int | None:
        """The special token with which the template ends an answer; None if it has none."""
        text, _ = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}], {}, _PROMPT)
        last = next((token for token in reversed(self.tokenizer.ids(text, end=False)) if self._is_written(token)), None)
        return last if last is not None and self.tokenizer.is_added(last) else None

    def _is_written(self, token: int) -> bool:
        return bool(self.tokenizer.decode([token]).strip())

    def _conversation(self, messages: Messages, extras: Mapping[str, Any], where: Where) -> Turns:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.train_on == "all" or not answers:
            tokens = self.tokenizer.encode(self._render(messages, extras, where)[0], end=False)
            if answers and answers[-1] == len(messages) - 1:
                self._check_end(tokens, len(tokens), where)
            return Turns(tokens, np.full(len(tokens), self.train_on == "all"))
        if self.train_on == "last":
            answers = answers[-1:]
        marked = _MARKERS.search(self._source(where)) is not None
        text, spans = self._render(messages, extras, where, marked=marked)
        tokens, starts, ends = self._tokens(text)
        trained = np.zeros(len(tokens), np.bool_)
        if marked:
            spans = [span for span in spans if span[0] < span[1]]
            for begin, end in spans[-1:] if self.train_on == "last" else spans:
                # a token belongs to a span if it holds one of the span's characters, as in transformers
                own = (starts < end) & (ends > begin)
                trained |= own
                self._check_end(tokens, len(own) - int(own[::-1].argmax()), where)
            return Turns(tokens, trained)
        for answer in answers:
            first, end = self._bounds(messages, answer, (text, tokens), extras, where)
            trained[first:end] = True
            self._check_end(tokens, end, where)
        return Turns(tokens, trained)

    def _bounds(
        self,
        messages: Messages,
        answer: int,
        whole: tuple[str, NDArray[np.int32]],
        extras: Mapping[str, Any],
        where: Where,
    ) -> tuple[int, int]:
        """Return the positions in the tokens at which an answer begins and ends."""
        before, _ = self._render(messages[:answer], extras, where, prompt=True)
        first = self._length_of(before, whole, where)
        if answer == len(messages) - 1:
            return first, len(whole[1])
        with_answer, _ = self._render(messages[: answer + 1], extras, where)
        return first, self._length_of(with_answer, whole, where)

    def _length_of(self, prefix: str, whole: tuple[str, NDArray[np.int32]], where: Where) -> int:
        """Return the number of tokens of a text with which the whole text must begin."""
        text, tokens = whole
        if not text.startswith(prefix):
            raise DataError(
                "data.turns_rewritten",
                "{where}: the chat template changes earlier turns when the conversation continues, so the tokens of "
                "the assistant's turn are not in the whole conversation. {fix}, or train_on: last.",
                where=where,
                fix=_OTHER_TEMPLATE,
            )
        found = self.tokenizer.encode(prefix, end=False)
        if not np.array_equal(found, tokens[: len(found)]):
            raise _merged(text[len(prefix) - 20 : len(prefix) + 20], where)
        return len(found)

    def _pair(self, prompt: Messages, completion: Messages, extras: Mapping[str, Any], where: Where) -> Turns:
        text, _ = self._render(prompt + completion, extras, where)
        tokens = self.tokenizer.encode(text, end=False)
        before, _ = self._render(prompt, extras, where, prompt=True)
        first = 0 if self.train_on == "all" else self._length_of(before, (text, tokens), where)
        self._check_end(tokens, len(tokens), where)
        return Turns(tokens, np.arange(len(tokens)) >= first)

    def _text_pair(self, prompt: str, completion: str, where: Where) -> Turns:
        end = self.tokenizer.token(self.tokenizer.end_token_id)
        text = prompt + completion + ("" if completion.endswith(end) else end)
        tokens, before = (np.array(self.tokenizer.with_specials(part), np.int32) for part in (text, prompt))
        if self.train_on != "all" and not np.array_equal(before, tokens[: len(before)]):
            raise _merged(text[max(0, len(prompt) - 20) : len(prompt) + 20], where)
        return Turns(tokens, np.arange(len(tokens)) >= (0 if self.train_on == "all" else len(before)))

    def _check_end(self, tokens: NDArray[np.int32], end: int, where: Where) -> None:
        """Verify that the tokens before `end` end with a token at which generation stops."""
        last = end - 1
        while last > 0 and not self.tokenizer.decode(tokens[last : last + 1]).strip():
            last -= 1
        if end == 0 or not self.tokenizer.is_added(int(tokens[last])):
            raise DataError(
                "data.turn_without_end",
                "{where}: the assistant's turn ends with {text} instead of a special token that counts in the loss, so "
                "the tuned model would not stop. In a copy of the chat template, add {{{{ eos_token }}}} after the "
                "assistant's messages, before {{% endgeneration %}} if the template has this marker. Then set "
                "data.template to the copy.",
                where=where,
                text=repr(self.tokenizer.decode(tokens[max(0, end - 8) : end])),
            )

    def _tokens(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of a text, and the span of each in the text."""
        ids, spans = self.tokenizer.with_spans(text)
        bounds = np.array(spans, np.int64).reshape(-1, 2)
        return np.array(ids, np.int32), bounds[:, 0], bounds[:, 1]

    def _source(self, where: Where) -> str:
        if self.template is None:
            raise DataError(
                "data.no_chat_template",
                "{where}: this row has messages, but {folder} has no chat template (chat_template.jinja, or "
                '"chat_template" in tokenizer_config.json). Set data.template to a file with a template.',
                where=where,
                folder=self.tokenizer.path.parent.absolute(),
            )
        return self.template

    def _render(
        self,
        messages: Messages,
        extras: Mapping[str, Any],
        where: Where,
        *,
        prompt: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of messages, and the marked spans of characters if `marked`."""
        render = optional_package("transformers.utils.chat_template_utils", "transformers", "hf").render_jinja_template
        source, own = self._source(where), extras.get("chat_template_kwargs") or {}
        try:
            texts, spans = render(
                [messages],
                tools=extras.get("tools"),
                documents=extras.get("documents"),
                chat_template=source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                continue_final_message=False,
                **{**self.arguments, **own},
            )
        except Exception as error:  # the template's own errors, and values that it cannot use
            raise DataError(
                "data.conversation_refused",
                "{where}: the chat template refuses the roles {roles}: {reason}. Repair the row, or name another "
                "template with data.template.",
                where=where,
                roles=[message["role"] for message in messages],
                reason=f"{type(error).__name__}: {error}",
            ) from error
        return texts[0], list(spans[0]) if spans else []


def _messages(value: Any, name: str, where: Where) -> Messages:
    """Return messages with the keys `role` and `content`, without the empty fields of tables."""
    value = _parsed(value)
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise DataError(
            "data.messages_invalid",
            "{where}: the column {name} holds {what}, which is not a list of messages such as "
            '[{{"role": "user", "content": "…"}}, {{"role": "assistant", "content": "…"}}]',
            where=where,
            name=name,
            what="an empty list" if isinstance(value, list) and not value else f"a {type(value).__name__}",
        )
    return [_message(message, name, where) for message in value]


def _message(message: dict[str, Any], name: str, where: Where) -> dict[str, Any]:
    if "from" in message and "role" not in message:
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        role = _ROLES.get(str(message["from"]))
        if role is None:
            raise DataError(
                "data.role_unknown",
                "{where}: the column {name} has a message from {role}. Known roles are {known}. For other roles, write "
                "messages with role and content.",
                where=where,
                name=name,
                role=repr(message["from"]),
                known=list(_ROLES),
            )
        return {"role": role, "content": message.get("value", ""), **others}
    if not isinstance(message.get("role"), str):
        raise DataError(
            "data.message_without_role",
            "{where}: the column {name} has a message with the keys {keys}. A message needs role and content.",
            where=where,
            name=name,
            keys=list(message),
        )
    return message


def _extras(row: Mapping[str, Any], where: Where) -> dict[str, Any]:
    """Return the columns of a row that are passed to the template."""
    return {name: _parsed(row[name]) for name in _EXTRAS if row.get(name) is not None}


def _parsed(value: Any) -> Any:
    """Return a value of plain Python types; JSON in a text is parsed.

    Dicts lose the fields that a table leaves empty.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            return _plain(json.loads(value))
    return _plain(value)


def _content(message: Mapping[str, Any]) -> Any:
    return message.get("content", message.get("value"))


def _common(chosen: Any, rejected: Any, where: Where) -> int:
    """Return the number of messages, or of characters, that two completed conversations have in common.

    A completion has at least one message. Completions that are texts begin with the space before the first word that
    differs.
    """
    both = isinstance(chosen, list) and isinstance(rejected, list)
    if not both and not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise DataError(
            "data.preference_mixed",
            "{where}: chosen is a {chosen}, but rejected is a {rejected}. Both must be texts or lists of messages.",
            where=where,
            chosen=type(chosen).__name__,
            rejected=type(rejected).__name__,
        )
    most = min(len(chosen), len(rejected)) - both
    shared = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if isinstance(chosen, str):
        shared = max((i for i in range(shared, 0, -1) if chosen[i - 1 : i].isspace()), default=0)
        shared = len(chosen[:shared].rstrip())
    if not shared:
        raise DataError(
            "data.no_common_prompt",
            "{where}: this row has no prompt, and chosen and rejected begin differently. Add a column prompt.",
            where=where,
        )
    return shared


def _text_or_messages(value: Any) -> Any:
    """Return a text, or messages that may be written as JSON in a text."""
    found = _parsed(value)
    are_messages = isinstance(found, list) and all(isinstance(each, dict) and "role" in each for each in found)
    return found if are_messages else value


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items() if entry is not None}
    return value


def _merged(around: str, where: Where) -> DataError:
    return DataError(
        "data.turn_within_token",
        "{where}: one token spans the end of the prompt and the start of the answer, in {around}, so the loss cannot "
        "count the answer alone. Move spaces at the end of the prompt to the start of the answer, or set train_on: "
        "all.",
        where=where,
        around=repr(around),
    )


def _template_of(folder: Path) -> str | None:
    """Return the chat template in a tokenizer's folder; None without one."""
    if (folder / _FILE).exists():
        return _read(folder / _FILE).decode()
    if not (folder / _CONFIG).exists():
        return None
    found = json.loads(_read(folder / _CONFIG)).get(_KEY)
    if isinstance(found, list):  # several templates with names
        named = {each.get("name"): each.get("template") for each in found}
        found = named.get("default", next(iter(named.values()), None))
    return found if isinstance(found, str) else None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(
            "data.template_unreadable", "{file}: {reason}", file=file.absolute(), reason=error.strerror or error
        ) from error


def _reproducible(source: str, day: date, place: Path) -> str:
    """Return a template in which `day` replaces today's date.

    Raises:
        DataError: the template is invalid, or uses random numbers or the current time in another way.
    """
    jinja2 = optional_package("jinja2", "jinja2", "hf")
    fixed = _NOW.sub(lambda call: json.dumps(day.strftime(call[2])), source)
    try:
        words = [(kind, text) for _, kind, text in jinja2.Environment().lex(fixed) if kind != "whitespace"]
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            "data.template_invalid", "{place}: the chat template is invalid: {error}", place=place, error=error
        ) from error
    names = [(before[1], text) for before, (kind, text) in pairwise([("", ""), *words]) if kind == "name"]
    for before, name in names:
        if name == "lipsum" or (before, name) == ("|", "random") or (name == "strftime_now" and _calls(fixed)):
            raise DataError(
                "data.template_not_reproducible",
                "{place}: the chat template uses {name}, so every start would train on different text. Set "
                "data.template to a copy of the template without {name}.",
                place=place,
                name=name,
            )
    return fixed


def _calls(source: str) -> bool:
    return re.search(r"strftime_now\s*\(", source) is not None
