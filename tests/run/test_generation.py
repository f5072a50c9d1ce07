"""The language model of a run continues prompts, as transformers would from the exported folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commands import paceline
from language_runs import GPT2, LLAMA, T5, hugging_face_run, run_of, writing_run
from paceline.errors import JobError, RunError
from paceline.run.convert import export_hf
from paceline.run.generation import Sampling, TextModel
from refusals import raises
from small_tokenizers import END


@pytest.mark.parametrize(("config", "task"), [(LLAMA, "causal_lm"), (GPT2, "causal_lm"), (T5, "seq2seq_lm")])
def test_the_text_is_what_transformers_generates_from_the_exported_folder(
    tmp_path: Path, config: dict[str, Any], task: str
) -> None:
    import transformers

    run = hugging_face_run(tmp_path, config, task)
    export_hf(run.path, tmp_path / "out")
    classes = {"causal_lm": transformers.AutoModelForCausalLM, "seq2seq_lm": transformers.AutoModelForSeq2SeqLM}
    theirs = classes[task].from_pretrained(tmp_path / "out", local_files_only=True).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "out" / "tokenizer.json"))
    model = TextModel.of_run(run)
    prompt = model.form.encode("The river")
    assert prompt == tokenizer("The river", add_special_tokens=False).input_ids
    expected = theirs.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=tokenizer.convert_tokens_to_ids(END)
    )[0]
    written = expected[1:] if task == "seq2seq_lm" else expected[len(prompt) :]
    parts: list[str] = []
    text = model.write(prompt, Sampling(12), parts.append)
    assert text == str(tokenizer.decode(written, skip_special_tokens=False)).removesuffix(END)
    assert len(written) > 3, "the comparison is empty"
    assert "".join(parts) == text, "the streamed text differs"


def test_a_folder_generates_as_the_run_that_it_was_exported_from(tmp_path: Path) -> None:
    run = hugging_face_run(tmp_path, LLAMA)
    export_hf(run.path, tmp_path / "out")
    texts = set()
    for source in ("run", "out"):
        outcome = paceline("generate", source, "The river", "--max-new-tokens", "9", folder=tmp_path)
        assert outcome.code == 0, outcome.err
        texts.add(outcome.out)
    assert len(texts) == 1


def test_drawn_text_depends_only_on_the_seed(tmp_path: Path) -> None:
    model = TextModel.of_run(hugging_face_run(tmp_path, LLAMA))
    prompt = model.form.encode("The")
    before = torch.get_rng_state()
    texts = [model.write(prompt, Sampling(20, temperature=3.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before), "the random numbers of the process were drawn from"
    assert model.write(prompt, Sampling(20, temperature=3.0, top_k=1)) == model.write(prompt, Sampling(20))


def test_a_chat_ends_with_the_turn_of_the_template(tmp_path: Path) -> None:
    run = hugging_face_run(tmp_path, LLAMA)
    model = TextModel.of_run(run)
    tokens = model.form.encode_chat([{"role": "user", "content": "hello"}])
    assert model.form.decode(tokens) == f"user: hello{END}assistant: "
    outcome = paceline("generate", "run", "hello", "--chat", "--json", "--max-new-tokens", "9", folder=tmp_path)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == {"prompt": "hello", "text": model.write(tokens, Sampling(9))}


def test_a_text_stops_at_the_context_of_the_model(tmp_path: Path) -> None:
    model = TextModel.of_run(hugging_face_run(tmp_path, {**LLAMA, "max_position_embeddings": 12}))
    model.form.ends = set()
    prompt = model.form.encode("The river")
    assert len(prompt) < 12
    assert model.write(prompt, Sampling(50)) == model.write(prompt, Sampling(12 - len(prompt)))
    with raises(RunError, "generate.prompt_too_long", context=12):
        model.write(prompt * 4, Sampling(5))
    with raises(RunError, "generate.prompt_empty"):
        model.write([], Sampling(5))


def test_characters_of_several_bytes_are_shown_whole(tmp_path: Path) -> None:
    word = "x" + "Fuß€".encode().decode("latin-1")
    model = TextModel.of_run(writing_run(tmp_path, word))
    parts: list[str] = []
    assert model.write(model.form.encode("x"), Sampling(7), parts.append) == "Fuß€"
    assert parts == ["F", "u", "ß", "€"]


def test_generated_text_cannot_control_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing_run(tmp_path, "a\x1b[2J")
    outcome = paceline("generate", "run", "a", "--max-new-tokens", "4", folder=tmp_path)
    assert outcome.out.strip() == r"\x1b[2J"
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nba\n"))
    outcome = paceline("generate", "run", "--max-new-tokens", "2", folder=tmp_path)
    assert outcome.out.splitlines() == ["> a", r"\x1b[", "> ba", r"\x1b["]


def test_what_cannot_write_text_is_refused(tmp_path: Path) -> None:
    bert = {
        "model_type": "bert",
        "vocab_size": 320,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    with raises(JobError, "generate.not_a_language_model", task="masked_lm"):
        TextModel.of_run(hugging_face_run(tmp_path, bert, "masked_lm"))
    with raises(JobError, "generate.no_tokenizer"):
        TextModel.of_run(run_of(tmp_path / "other", model="mlp", data="digits"))
    (tmp_path / "third").mkdir()
    model = TextModel.of_run(writing_run(tmp_path / "third", "abc"))
    with raises(JobError, "generate.no_chat_template"):
        model.form.encode_chat([{"role": "user", "content": "hello"}])


logits = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=9)


@given(logits, st.integers(1, 9), st.floats(0.01, 1.0), st.floats(0.1, 4.0))
def test_drawn_tokens_are_among_the_most_likely(values: list[float], k: int, p: float, temperature: float) -> None:
    table = torch.tensor([values])
    random = torch.Generator().manual_seed(0)
    chances = (table.double() / temperature).softmax(-1)[0]
    order = chances.argsort(descending=True)
    for _ in range(5):
        by_number = int(Sampling(temperature=temperature, top_k=k).choose(table, random))
        assert (chances > chances[by_number]).sum() < k
        by_chance = int(Sampling(temperature=temperature, top_p=p).choose(table, random))
        before = chances[order][: int((chances > chances[by_chance]).sum())].sum()
        assert before < p + 1e-9
    assert values[int(Sampling().choose(table, random))] == max(values)
