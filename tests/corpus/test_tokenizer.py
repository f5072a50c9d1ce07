"""Text becomes the tokens of the tokenizer's library, and a file that is no tokenizer is refused."""

from __future__ import annotations

import builtins
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models

from paceline.corpus.tokenizer import Tokenizer
from paceline.errors import DataError
from refusals import raises
from small_tokenizers import END, MASK, PAD, SENTENCES, save_tokenizer

NAMES = {"eos_token": END, "mask_token": MASK, "pad_token": PAD}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), names=NAMES)


def test_a_document_is_the_tokens_of_the_library_and_an_end_token(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), Library.from_file(str(folder / "tokenizer.json"))
    for text in (*SENTENCES, "", "  two\n\nlines\t", "日本語 🙂"):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == [*ids, ours.end_token_id]
        assert ours.encode(text, end=False).tolist() == ids
        assert ours.decode(ours.encode(text, end=False)) == text


def test_special_tokens_come_from_the_files_of_a_hugging_face_folder(folder: Path) -> None:
    tokenizer, ids = Tokenizer.load(folder), Library.from_file(str(folder / "tokenizer.json")).get_vocab()
    assert tokenizer.end_token_id == ids[END]
    assert tokenizer.mask_token_id == ids[MASK]
    assert tokenizer.pad_token_id == ids[PAD]
    assert tokenizer.vocab_size == max(ids.values()) + 1
    assert tokenizer.token(tokenizer.end_token_id) == END


def test_the_names_of_special_tokens_may_be_objects_and_the_configuration_overrides_the_map(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, names={"eos_token": END})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": PAD, "pad_token": {"content": PAD}}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.token(tokenizer.end_token_id) == END
    assert tokenizer.token(tokenizer.pad_token_id) == PAD


def test_a_single_file_has_its_well_known_end_token_and_pads_with_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path) / "tokenizer.json")
    assert tokenizer.token(tokenizer.end_token_id) == END
    assert tokenizer.pad_token_id == tokenizer.end_token_id
    assert tokenizer.mask_token_id is None


def test_padding_and_truncation_of_the_file_and_its_template_change_no_document(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    model = Library.from_file(str(tmp_path / "tokenizer.json"))
    model.enable_truncation(4)
    model.enable_padding(length=64)
    model.save(str(tmp_path / "cut.json"))
    whole, cut = (Tokenizer.load(tmp_path / name) for name in ("tokenizer.json", "cut.json"))
    assert cut.encode(SENTENCES[0]).tolist() == whole.encode(SENTENCES[0]).tolist()


def test_unpaired_surrogates_become_replacement_characters(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode(json.loads('"a\\ud800b"'), end=False)) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode(json.loads('"\\ud83d\\ude42"'), end=False)) == "🙂"


def test_the_hash_changes_with_the_file_and_with_the_special_tokens(tmp_path: Path, folder: Path) -> None:
    first = Tokenizer.load(folder).sha256
    assert Tokenizer.load(save_tokenizer(tmp_path / "same", names=NAMES)).sha256 == first
    assert Tokenizer.load(save_tokenizer(tmp_path / "larger", vocab=330, names=NAMES)).sha256 != first
    assert Tokenizer.load(save_tokenizer(tmp_path / "other_end", names=NAMES | {"eos_token": PAD})).sha256 != first


def test_a_tokenizer_can_be_sent_to_another_process(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    sent = pickle.loads(pickle.dumps(tokenizer))
    assert sent == tokenizer
    assert sent.encode(SENTENCES[2]).tolist() == tokenizer.encode(SENTENCES[2]).tolist()


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"model": 3}')
    (tmp_path / "empty").mkdir()
    (save_tokenizer(tmp_path / "broken") / "tokenizer_config.json").write_text("{")
    for path, code in (
        (tmp_path / "none", "data.tokenizer_unreadable"),
        (tmp_path / "empty", "data.tokenizer_unreadable"),
        (tmp_path / "job.json", "data.not_a_tokenizer"),
        (save_tokenizer(tmp_path / "no_end", end="<stop>"), "data.no_end_token"),
        (save_tokenizer(tmp_path / "other", names={"eos_token": "</end>"}), "data.special_token_unknown"),
        (tmp_path / "broken", "data.tokenizer_config_invalid"),
    ):
        with raises(DataError, code):
            Tokenizer.load(path)


def test_a_missing_package_is_named_with_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_tokenizers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with raises(DataError, "data.package_missing", package="tokenizers"):
        Tokenizer.load(folder)


def test_text_without_a_token_is_an_error_that_names_the_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    Library(models.WordLevel({"known": 0, "</s>": 1}, unk_token="[UNK]")).save(str(file))
    tokenizer = Tokenizer.load(file)
    assert tokenizer.encode("known").tolist() == [0, 1]
    with raises(DataError, "data.text_not_encoded", file=file, start=repr("unknown")):
        tokenizer.encode("unknown")
