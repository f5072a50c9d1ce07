"""Make a small language model and small data for the recipes, from text that comes with Python.

    python examples/finetune/make_small.py            # writes examples/finetune/small, in about a minute

The folder `small` then contains:

- `base`: a Llama of 1.3 million parameters in Hugging Face's layout, with a tokenizer and a chat template. The model
  was trained on documentation and source code for a few hundred steps. It continues text, but answers no questions.
- `docs.jsonl`, `code.jsonl`: text for pretraining, one document per row (`text`).
- `chat.jsonl`: conversations (`messages`). The user shows lines of text, and the assistant says whether each is Python
  or English.
- `preferences.jsonl`: pairs of a better and a worse answer (`prompt`, `chosen`, `rejected`).
- `lines.jsonl`: lines of text with their class (`text`, `label`: 0 is English, 1 is Python).
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

STDLIB = Path(sysconfig.get_path("stdlib"))
END, PAD, MASK = "<|end|>", "<|pad|>", "<|mask|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
TEMPLATE = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}
{% else %}
{{ message['content'] + '<|end|>' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
TASK = "Say whether each line is Python or English."
ANSWERS = {0: "This is English.", 1: "This is Python."}
WORSE = {0: "It is English, I think, but who knows.", 1: "It is Python, I think, but who knows."}
CONTEXT = 128
_SENTENCE = re.compile(r"[A-Z][a-z]* [\w ,;'’-]+")
_STATEMENT = re.compile(r"\s+(return|if|for|while|raise|assert|with|def|self\.\w+ =|\w+ =)\b.*")


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "small")
    parser.add_argument("--steps", type=int, default=300, help="steps of pretraining; 0: random weights")
    options = parser.parse_args()
    make(options.folder, steps=options.steps)
    print(options.folder)


def make(folder: Path, *, steps: int = 300, seed: int = 0) -> None:
    """Write the model, its tokenizer and all data into `folder`."""
    drawn = random.Random(seed)
    docs = list(documentation())
    code = drawn.sample(functions := list(source_code()), len(functions) // 3)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "docs.jsonl", [{"text": text} for text in docs])
    _write(folder / "code.jsonl", [{"text": text} for text in code])
    lines = _labelled(docs, code, drawn)
    _write(folder / "lines.jsonl", [{"text": text, "label": label} for text, label in lines])
    _write(folder / "chat.jsonl", list(_conversations(lines, drawn)))
    _write(folder / "preferences.jsonl", list(_preferences(lines)))
    tokenizer = save_tokenizer([*docs, *code], folder / "base")
    save_model(tokenizer, [*docs, *code], folder / "base", steps=steps, seed=seed)


def documentation() -> Iterator[str]:
    """Yield the topics of the language reference."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


def source_code() -> Iterator[str]:
    """Yield functions and classes of the standard library without their docstrings."""
    for file in sorted(STDLIB.glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := _without_docstring(node, source)):
                yield text


def save_tokenizer(texts: list[str], folder: Path, *, vocab: int = 2048) -> Tokenizer:
    """Train a byte-level BPE tokenizer and save it with a chat template, as `AutoTokenizer` reads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END, PAD, MASK, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4 * CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return tokenizer


def save_model(tokenizer: Tokenizer, texts: list[str], folder: Path, *, steps: int, seed: int) -> None:
    """Train a small Llama on texts for some steps, and save its weights in bfloat16."""
    torch.manual_seed(seed)
    end, pad = tokenizer.encode(END).ids[0], tokenizer.encode(PAD).ids[0]
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * CONTEXT,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [*encoding.ids, end]
    tokens = torch.tensor(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(1, steps))
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (16, 1))
        batch = tokens[starts + torch.arange(CONTEXT + 1)]
        logits = model(batch[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = pad
    model.bfloat16().save_pretrained(folder)


def _without_docstring(node: ast.FunctionDef | ast.ClassDef, source: str) -> str:
    text = ast.get_source_segment(source, node) or ""
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        lines = text.splitlines(keepends=True)
        at = first.lineno - node.lineno
        text = "".join(lines[:at] + lines[at + (first.end_lineno or first.lineno) - first.lineno + 1 :])
    return text


def _labelled(docs: list[str], code: list[str], drawn: random.Random) -> list[tuple[str, int]]:
    """Return equal numbers of sentences and lines of code with their labels, shuffled."""
    english = [" ".join(part.split()) for text in docs for part in re.split(r"\.\s|\n\n", text)]
    english = [text for text in english if 30 <= len(text) <= 120 and _SENTENCE.fullmatch(text)]
    python = [line.strip() for text in code for line in text.splitlines() if _STATEMENT.match(line)]
    python = [line for line in python if 20 <= len(line) <= 120]
    count = min(len(english), len(python), 2000)
    labelled = [(text, 0) for text in drawn.sample(english, count)] + [
        (text, 1) for text in drawn.sample(python, count)
    ]
    drawn.shuffle(labelled)
    return labelled


def _conversations(lines: list[tuple[str, int]], drawn: random.Random) -> Iterator[dict[str, Any]]:
    """Yield conversations of one to three turns."""
    at = 0
    while at < len(lines):
        turns = drawn.randint(1, 3)
        messages = [{"role": "system", "content": TASK}]
        for text, label in lines[at : at + turns]:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ANSWERS[label]}]
        yield {"messages": messages}
        at += turns


def _preferences(lines: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    for text, label in lines:
        asked = [{"role": "system", "content": TASK}, {"role": "user", "content": text}]
        yield {
            "prompt": asked,
            "chosen": [{"role": "assistant", "content": ANSWERS[label]}],
            "rejected": [{"role": "assistant", "content": WORSE[label]}],
        }


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
