"""Text that the language model of a run generates, token by token."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.corpus.chat import ChatForm, Messages
from paceline.corpus.tokenizer import Tokenizer
from paceline.device import forked_random
from paceline.errors import JobError, RunError
from paceline.job.data import Chat
from paceline.job.job import Job
from paceline.job.loss_items import logits_of
from paceline.job.model import ModelSpec
from paceline.job.zoo.arrays import ByteTokenizer
from paceline.job.zoo.chat import chat_form
from paceline.run.convert import fitted, load_weights, weights_from
from paceline.run.model_folder import settings_folder, tokenizer_folder
from paceline.run.record.run import Run
from paceline.run.saved_model import device_of_models, whole_model
from paceline.state.reader import NEWEST

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")
_LANGUAGE_TASKS = ("causal_lm", "seq2seq_lm")
_NARROW = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
_UNFINISHED = "\ufffd"  # decoded from the first bytes of a character


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token.

    Attributes:
        max_new_tokens: largest number of tokens to generate.
        temperature: divisor of the logits; None chooses the most likely token.
        top_p: draw from the smallest set of tokens with at least this probability.
        top_k: draw from this number of most likely tokens.
        seed: seed for sampling tokens.
    """

    max_new_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def choose(self, logits: Tensor, random: torch.Generator) -> Tensor:
        """Return the chosen tokens (n,) for logits (n, vocab), both on the host."""
        if self.temperature is None:
            return logits.argmax(-1)
        ordered, tokens = (logits.double() / self.temperature).sort(-1, descending=True)
        chances = ordered.softmax(-1)
        if self.top_k is not None:
            chances[:, self.top_k :] = 0.0
        if self.top_p is not None:
            chances = chances / chances.sum(-1, keepdim=True)
            # the first token that reaches the probability is kept
            chances[chances.cumsum(-1) - chances >= self.top_p] = 0.0
        return tokens.gather(1, torch.multinomial(chances, 1, generator=random)).squeeze(1)


class TextForm:
    """Conversion of prompts to tokens and of tokens to text.

    Prompts become the same tokens as in the training of the job.

    Attributes:
        ends: tokens that end a text.
    """

    def __init__(self, tokenizer: _Decoder, chats: Callable[[], ChatForm], *, specials: bool, ends: set[int]) -> None:
        self._tokenizer, self._chats, self._specials, self.ends = tokenizer, chats, specials, ends

    @classmethod
    def of_job(cls, job: Job) -> TextForm:
        """Return the form of a job's data.

        Raises:
            JobError: neither the data nor the model's folder has a tokenizer.
        """
        if job.data.kind == "text":
            return cls(ByteTokenizer(), _no_chats, specials=False, ends=set())
        folder = tokenizer_folder(job)
        if folder is None:
            raise no_tokenizer()
        # Documents of kind: tokens begin without special tokens.
        form = cls.of_folder(folder, settings_folder(job), specials=job.data.kind != "tokens")
        if isinstance(job.data, Chat):
            spec = job.data
            form._chats = lambda: chat_form(spec)
        return form

    @classmethod
    def of_folder(cls, folder: Path, settings: Path | None, *, specials: bool = True) -> TextForm:
        """Return the form of a tokenizer's folder.

        Args:
            settings: folder with generation settings, which may name more tokens that end a text.
            specials: add special tokens to prompts, such as a token for the beginning.
        """
        tokenizer = Tokenizer.load(folder)
        ends = {tokenizer.end_token_id, *(_ends(settings) if settings is not None else ())}
        return cls(
            tokenizer,
            lambda: ChatForm.load(tokenizer, None, Chat.model_fields["date"].default),
            specials=specials,
            ends=ends,
        )

    def encode(self, prompt: str) -> list[int]:
        """Convert a prompt to tokens."""
        if not isinstance(self._tokenizer, Tokenizer):
            return list(prompt.encode())
        if not self._specials:
            return self._tokenizer.ids(prompt, end=False)
        tokens = self._tokenizer.with_specials(prompt)
        while tokens and tokens[-1] == self._tokenizer.end_token_id:
            tokens.pop()
        return tokens

    def encode_chat(self, messages: Messages) -> list[int]:
        """Convert a conversation to tokens with the chat template.

        From this call on, the token that ends a turn in the template also ends generated texts.
        """
        chats = self._chats()
        if (end := chats.end_of_turn) is not None:
            self.ends = {*self.ends, end}
        return chats.prompt(messages)

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text."""
        return self._tokenizer.decode(tokens)


class _Decoder(Protocol):
    def decode(self, tokens: Any) -> str: ...


class TextModel:
    """A language model with its tokenizer, in this process.

    Attributes:
        model: the whole model, in eval mode.
        form: conversion of texts.
        job: job of the run; None for a Hugging Face folder.
    """

    def __init__(self, model: nn.Module, form: TextForm, job: Job | None = None, precision: str = "fp32") -> None:
        self.model, self.form, self.job, self._precision = model.eval(), form, job, precision

    @classmethod
    def of_run(cls, run: Run, checkpoint: str = NEWEST) -> TextModel:
        """Load the model of a run's checkpoint.

        Raises:
            JobError: the model is not a language model, or there is no tokenizer.
            RunError: the checkpoint does not exist.
        """
        job = run.job
        job.model.must_be_at_hand()
        _must_write_text(job.model)
        form = TextForm.of_job(job)
        return cls(whole_model(run, checkpoint), form, job, run.plan.precision or job.precision)

    @classmethod
    def of_folder(cls, folder: Path) -> TextModel:
        """Load the model of a folder in Hugging Face's layout, such as an exported folder."""
        spec = ModelSpec.model_validate({"hf": folder / "config.json", "task": "causal_lm"})
        model = spec.build()
        load_weights({**dict(model.named_parameters()), **_in_state(model)}, None, fitted(weights_from(folder), model))
        return cls(model.to(device_of_models()), TextForm.of_folder(folder, folder))

    @property
    def context(self) -> int | None:
        """Largest number of tokens that the model can read; None if it is unknown."""
        config = getattr(self.model, "config", None)
        found = [getattr(config, key, None) for key in _CONTEXT_KEYS] + [getattr(self.model, "context", None)]
        return next((value for value in found if isinstance(value, int)), None)

    def write(
        self, prompt: Sequence[int], sampling: Sampling, show: Callable[[str], object] = lambda part: None
    ) -> str:
        """Return the text that follows a prompt.

        Args:
            prompt: tokens of the prompt.
            show: function that gets each part of the text as soon as it is known.

        Raises:
            RunError: the prompt is empty, or leaves no room in the context of the model.
        """
        sampling = self._within_context(prompt, sampling)
        # the output of an encoder-decoder model does not begin with the prompt
        text = _Text(self.form, [] if self._encodes else list(prompt), show)
        if isinstance(self.model, _generating()):
            self._generate(prompt, sampling, text)
        else:
            ids = torch.tensor([list(prompt)], device=self._device)
            with torch.inference_mode(), self._autocast():
                for token in continued(lambda ids: logits_of(self.model(ids))[:, -1], ids, sampling):
                    if not text.add(int(token)):
                        break
        return text.end()

    def _generate(self, prompt: Sequence[int], sampling: Sampling, text: _Text) -> None:
        """Generate with transformers, which knows how each architecture keeps its cache."""
        from transformers import GenerationConfig

        model: Any = self.model
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0, "top_k": sampling.top_k or 0}
        settings = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=sampling.temperature is not None,
            eos_token_id=sorted(self.form.ends) or None,
            pad_token_id=min(self.form.ends, default=0),
            **(drawn if sampling.temperature is not None else {}),
        )
        for key in ("decoder_start_token_id", "bos_token_id"):
            setattr(settings, key, getattr(model.config, key, None))
        ids = torch.tensor([list(prompt)], device=self._device)
        with torch.inference_mode(), self._autocast(), forked_random(self._device):
            torch.manual_seed(sampling.seed)
            model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=_Streamer(text)
            )

    @property
    def _encodes(self) -> bool:
        return bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _autocast(self) -> AbstractContextManager[Any]:
        narrow = _NARROW.get(self._precision)
        return nullcontext() if narrow is None else torch.autocast(self._device.type, narrow)

    def _within_context(self, prompt: Sequence[int], sampling: Sampling) -> Sampling:
        if not prompt:
            raise RunError("generate.prompt_empty", "the prompt has no tokens. Give a prompt of at least one letter.")
        if self.context is None or self._encodes:
            return sampling
        if len(prompt) >= self.context:
            raise RunError(
                "generate.prompt_too_long",
                "the prompt has {tokens} tokens, but the model's context is {context}, including the generated tokens. "
                "Shorten the prompt.",
                tokens=len(prompt),
                context=self.context,
            )
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.context - len(prompt)))


def continued(next_logits: Callable[[Tensor], Tensor], ids: Tensor, sampling: Sampling) -> Iterator[Tensor]:
    """Yield the next tokens (n,) of each row of `ids` (n, t), without a cache.

    Args:
        next_logits: function that returns the logits (n, vocab) after the last token of each row.
    """
    random = torch.Generator().manual_seed(sampling.seed)
    for _ in range(sampling.max_new_tokens):
        chosen = sampling.choose(next_logits(ids).float().cpu(), random)
        yield chosen
        ids = torch.cat([ids, chosen.to(ids.device)[:, None]], 1)


class _Text:
    """Text of tokens that arrive one by one."""

    def __init__(self, form: TextForm, tokens: list[int], show: Callable[[str], object]) -> None:
        self._form, self._tokens, self._show = form, tokens, show
        self._begin = self._shown = form.decode(tokens)

    def add(self, token: int) -> bool:
        """Add a token; return False if it ends the text."""
        if token in self._form.ends:
            return False
        self._tokens.append(token)
        text = self._form.decode(self._tokens)
        # the next tokens may complete a character
        if not text.endswith(_UNFINISHED) and text.startswith(self._shown):
            self._show(text[len(self._shown) :])
            self._shown = text
        return True

    def end(self) -> str:
        """Show the rest, and return the whole text without the prompt."""
        text = self._form.decode(self._tokens)
        if len(text) > len(self._shown):
            self._show(text[len(self._shown) :])
        return text[len(self._begin) :]


class _Streamer:
    """Receiver of the tokens that transformers generates."""

    def __init__(self, text: _Text) -> None:
        self._text, self._has_prompt = text, False

    def put(self, tokens: Tensor) -> None:
        if self._has_prompt:
            for token in tokens.reshape(-1).tolist():
                self._text.add(token)
        self._has_prompt = True  # the prompt comes first

    def end(self) -> None:
        pass


def _generating() -> tuple[type, ...]:
    """Return the class of models that transformers can generate with; empty without transformers."""
    if "transformers" not in sys.modules:
        return ()
    from transformers import GenerationMixin

    return (GenerationMixin,)


def no_tokenizer() -> JobError:
    """Return the error about a job whose texts cannot be converted."""
    return JobError(
        "generate.no_tokenizer",
        "the job has no tokenizer, so text cannot be read or written: neither data.tokenizer nor the folder of the "
        "model has one. Add a tokenizer.json to the folder of the model.",
    )


def _must_write_text(model: ModelSpec) -> None:
    if model.task is not None and model.task not in _LANGUAGE_TASKS:
        raise JobError(
            "generate.not_a_language_model",
            "a model for the task {task} does not write text. Models for the tasks {known} do.",
            task=model.task,
            known=list(_LANGUAGE_TASKS),
        )


def _ends(folder: Path) -> set[int]:
    """Return the tokens that end a text according to the generation settings of a folder."""
    try:
        found = json.loads((folder / "generation_config.json").read_bytes())["eos_token_id"]
    except (OSError, ValueError, LookupError, TypeError):
        return set()
    return {token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)}


def _no_chats() -> ChatForm:
    raise JobError(
        "generate.no_chat_template",
        "the data of the job has no tokenizer with a chat template. Leave out --chat.",
    )


def _in_state(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
