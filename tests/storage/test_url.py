"""URLs that may be recorded: whole, without secrets, of a protocol that all processes can reach."""

from __future__ import annotations

import sys

import pytest
from fsspec.registry import _registry

from paceline.errors import StorageError
from paceline.storage.store import Store
from paceline.storage.url import cache_name, checked_url, is_url, without_secrets
from refusals import raises


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("s3://key:secret@bucket/run", "storage.url_with_user"),
        ("https://host/data.npz?X-Amz-Signature=secret", "storage.url_with_secret"),
        ("s3://", "storage.url_incomplete"),
        ("file://folder/run", "storage.url_incomplete"),
        ("memory://run", "storage.protocol_of_one_process"),
        ("s4://bucket/run", "storage.protocol_unknown"),
        ("s3://bucket/../other", "storage.url_invalid"),
        ("simplecache::s3://bucket/run", "storage.not_a_url"),
        ("s3://bucket/\x1b[31m", "storage.url_invalid"),
    ],
)
def test_a_url_that_must_not_be_recorded_or_cannot_work_is_refused_without_its_secret(text: str, code: str) -> None:
    with raises(StorageError, code) as caught:
        checked_url(text)
    assert "secret@" not in str(caught.value)
    assert "=secret" not in str(caught.value)


def test_a_url_is_kept_without_the_slashes_at_its_end() -> None:
    assert checked_url("S3://bucket/run//") == "s3://bucket/run"
    assert checked_url("file:///data/run") == "file:///data/run"
    assert is_url("gs://bucket/x")
    assert not is_url("runs/mine")


def test_two_servers_with_the_same_url_have_two_places_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    at_amazon = cache_name("s3://bucket/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert cache_name("s3://bucket/run") != at_amazon


def test_a_librarys_message_loses_the_password_of_a_url() -> None:
    assert without_secrets('cannot reach "http://me:pw@host:9000/b"') == 'cannot reach "http://host:9000/b"'


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    monkeypatch.delitem(_registry, "s3", raising=False)
    with raises(StorageError, "storage.package_missing"):
        Store("s3://bucket/run")
