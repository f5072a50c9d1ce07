"""Texts that the model writes after the job's prompts, at every evaluation.

Every rank computes the forward passes of all prompts, however the plan divides the model, and all ranks continue with
the same tokens. There is no cache of keys and values, so a token costs a forward pass over the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.engine.engine import RankEngine
from paceline.errors import JobError
from paceline.job.batch import Batch
from paceline.job.job import Job
from paceline.job.loss_items import logits_of
from paceline.run.generation import Sampling, TextForm


class Samples:
    """Continuations of the prompts of `evaluate.prompts`, with the most likely tokens.

    Args:
        dataset: the validation set, whose samples have the form that the model reads.

    Raises:
        JobError: there is no tokenizer, or a prompt does not fit the context.
    """

    def __init__(self, job: Job, engine: RankEngine, dataset: Dataset[Any]) -> None:
        self._engine, self._form, self._prompts = engine, TextForm.of_job(job), job.evaluate.prompts
        self._tokens = [self._encoded(job, prompt) for prompt in self._prompts]
        self._example = dataset[0]
        context = len(self._inputs_of(self._example))
        longest = max(map(len, self._tokens))
        if longest >= context:
            raise JobError(
                "evaluate.prompt_too_long",
                "the prompt {prompt} of evaluate.prompts has {tokens} tokens, which leaves no room in data.context "
                "({context}). Shorten the prompt.",
                prompt=repr(max(self._prompts, key=len)[:40]),
                tokens=longest,
                context=context,
            )
        new = min(job.evaluate.max_new_tokens, context - longest)
        self._sampling = Sampling(new)
        # A divided model computes sequences of the length that it trains on.
        self._length = context if engine.plan.splits else longest + new

    def write(self) -> list[dict[str, str]]:
        """Return each prompt with its text; every rank must call this method."""
        engine = self._engine
        texts: list[list[int]] = [[] for _ in self._prompts]
        lengths = torch.tensor([len(tokens) for tokens in self._tokens])
        rows = torch.zeros(len(self._prompts), self._length, dtype=torch.long)
        for row, tokens in zip(rows, self._tokens, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        open_ = set(range(len(texts)))
        with engine.evaluation.measuring(engine.rule):
            for number in range(self._sampling.max_new_tokens):
                engine.evaluation.begin(number)
                chosen = self._next(rows, lengths + number)
                for i in sorted(open_):
                    rows[i, lengths[i] + number] = chosen[i]
                    if chosen[i] in self._form.ends:
                        open_.remove(i)
                    else:
                        texts[i].append(chosen[i])
                if not open_:
                    break
        engine.meter.restart()
        return [
            {"prompt": prompt, "text": self._form.decode([*tokens, *text])[len(self._form.decode(tokens)) :]}
            for prompt, tokens, text in zip(self._prompts, self._tokens, texts, strict=True)
        ]

    def _next(self, rows: Tensor, lengths: Tensor) -> list[int]:
        """Return the next token of each row, the same on all ranks."""
        found = self._engine.compute.output(self._batch(rows))
        chosen = None
        if found is not None:
            logits = logits_of(found[0])
            last = logits[torch.arange(len(rows), device=logits.device), (lengths - 1).to(logits.device)]
            chosen = last.argmax(-1).tolist()
        everyone: list[list[int] | None] = self._engine.group.gather_json(chosen)
        return next(tokens for tokens in everyone if tokens is not None)

    def _batch(self, rows: Tensor) -> Batch:
        """Return a batch in the form of the data.

        The values after the texts have no effect on the next tokens.
        """
        if not isinstance(self._example, Mapping):
            return rows, rows
        columns = {
            "input_ids": rows,
            "labels": rows,
            "position_ids": torch.arange(rows.shape[1]).expand(rows.shape).contiguous(),
            "attention_mask": torch.ones_like(rows),
        }
        return {name: columns[name] for name in self._example}  # of a packed sample, too

    def _inputs_of(self, sample: Any) -> Tensor:
        inputs: Tensor = sample["input_ids"] if isinstance(sample, Mapping) else sample[0]
        return inputs

    def _encoded(self, job: Job, prompt: str) -> list[int]:
        if job.data.kind == "chat":
            return self._form.encode_chat([{"role": "user", "content": prompt}])
        return self._form.encode(prompt)
