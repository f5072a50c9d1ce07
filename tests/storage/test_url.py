"""URLs that may be recorded: whole, without secrets, of a protocol that all processes can reach."""

from __future__ import annotations

import sys

import pytest
from fsspec.registry import _registry

from paceline.errors import StorageError
from paceline.storage.store import Store
from paceline.storage.url import cache_name, checked_url, is_url, without_secrets


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("s3://key:secret@bucket/run", "names a user"),
        ("https://host/data.npz?X-Amz-Signature=secret", "may hold a secret"),
        ("s3://", "is not whole; write s3://bucket/name"),
        ("file://folder/run", "is not whole; write file:///folder/name"),
        ("memory://run", "one process alone"),
        ("s4://bucket/run", 'no protocol "s4"'),
        ("s3://bucket/../other", r"without \.\."),
        ("simplecache::s3://bucket/run", "is not a URL"),
        ("s3://bucket/\x1b[31m", "printable"),
    ],
)
def test_a_url_that_must_not_be_recorded_or_cannot_work_is_refused_without_its_secret(
    text: str, complaint: str
) -> None:
    with pytest.raises(StorageError, match=complaint) as caught:
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
    with pytest.raises(StorageError, match=r"s3fs cannot be imported .*; run: pip install 'paceline\[s3\]'"):
        Store("s3://bucket/run")
