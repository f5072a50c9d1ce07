"""Small tokenizers, trained on a few sentences."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = (
    "The river was low that summer, and the boats lay on the sand.",
    "A tokenizer turns text into numbers, and numbers into text.",
    "Der Fluß war niedrig in jenem Sommer — und die Boote lagen im Sand.",
)
END, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"


CHAT_START, CHAT_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def save_chat_tokenizer(folder: Path, template: str | None = CHAT_TEMPLATE) -> Path:
    """Save a tokenizer with a chat template and its tokens; return the folder."""
    names = {"eos_token": CHAT_END, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
    save_tokenizer(folder, vocab=360, names=names, end=CHAT_END, more=(CHAT_START,))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def save_tokenizer(
    folder: Path,
    *,
    vocab: int = 320,
    names: dict[str, str] | None = None,
    end: str = END,
    more: tuple[str, ...] = (),
) -> Path:
    """Train a byte-level tokenizer and save it in Hugging Face's layout; return the folder.

    `names` is the content of `tokenizer_config.json`; None writes no such file. `more` are further special tokens.
    """
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[end, MASK, PAD, *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(SENTENCES * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    if names is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder
