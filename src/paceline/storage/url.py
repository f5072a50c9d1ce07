"""URLs of files and folders, with any protocol of fsspec: `s3://bucket/name`, `gs://…`, `file:///…`."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TypeGuard

from paceline.errors import StorageError
from paceline.text import nearest

DATA_VERSIONS = "PACELINE_DATA"  # environment variable of ranks: the versions of the job's files by URL, as JSON
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_USER = re.compile(r"//[^/@\s]*@")
_OF_ONE_PROCESS = ("memory",)
_WITHOUT_BUCKET = ("file", "local")


def is_url(what: object) -> TypeGuard[str]:
    """Return True if a string begins with a protocol such as `s3://`."""
    return isinstance(what, str) and _URL.match(what) is not None


def checked_url(text: str) -> str:
    """Check that a URL is valid and has no secrets; return it without trailing slashes.

    Raises:
        StorageError: the URL contains a user, a password or a query, or is incomplete. Or its protocol is unknown, or
            not reachable from other processes.
    """
    match = _URL.match(text)
    if match is None:
        raise StorageError(
            "storage.not_a_url", "{text!r} is not a URL. Write s3://bucket/name or file:///folder/name.", text=text
        )
    protocol, rest = match[1].lower(), match[2].rstrip("/")
    shown = without_secrets(text)
    if "@" in rest.partition("/")[0]:
        raise StorageError(
            "storage.url_with_user",
            "{url}: the URL contains a user, but URLs are written into records. Remove the user, and provide "
            "{credentials}.",
            url=shown,
            credentials=credentials_of(protocol),
        )
    if "?" in rest or "#" in rest:
        raise StorageError(
            "storage.url_with_secret",
            "{url}: a URL with ? or # may contain a secret, but URLs are written into records. Name only the "
            "object, and provide {credentials}.",
            url=shown.partition("?")[0],
            credentials=credentials_of(protocol),
        )
    if not rest.isprintable() or "::" in rest or ".." in rest.split("/"):
        raise StorageError(
            "storage.url_invalid",
            "{url!r}: a URL must consist of printable characters, without :: and without .. in its path",
            url=shown,
        )
    if protocol in _OF_ONE_PROCESS:
        raise StorageError(
            "storage.protocol_of_one_process",
            "{url}: {protocol}:// is visible to only one process, but a run has several ranks. Use file:///…",
            url=shown,
            protocol=protocol,
        )
    if not rest or (protocol in _WITHOUT_BUCKET) != rest.startswith("/"):
        whole = f"{protocol}:///folder/name" if protocol in _WITHOUT_BUCKET else f"{protocol}://bucket/name"
        raise StorageError("storage.url_incomplete", "{url} is incomplete. Write {whole}", url=shown, whole=whole)
    _must_exist(protocol, shown)
    return f"{protocol}://{rest}"


def protocol_of(url: str) -> str:
    """Return the protocol of a checked URL, such as `s3`."""
    return url.partition("://")[0]


def local_path(url: str) -> Path | None:
    """Return the path of a `file://` URL; None for other URLs."""
    return Path(url.partition("://")[2]) if protocol_of(url) in _WITHOUT_BUCKET else None


def cache_name(url: str) -> str:
    """Return the name of a checked URL's cache folder; S3 servers have separate names."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    named = f"{url} {endpoint if protocol_of(url) in ('s3', 's3a') else ''}"
    return hashlib.sha256(named.encode()).hexdigest()[:20]


def without_secrets(text: str) -> str:
    """Remove users and passwords in URLs from a text, such as a library's message."""
    return _USER.sub("//", text)


def credentials_of(protocol: str) -> str:
    """Describe the sources of a protocol's credentials."""
    if protocol in ("s3", "s3a"):
        return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ~/.aws, or a role of this machine"
    if protocol in ("gs", "gcs"):
        return "GOOGLE_APPLICATION_CREDENTIALS, gcloud's own file, or a role of this machine"
    return f"what fsspec reads for {protocol} (~/.config/fsspec, FSSPEC_{protocol.upper()}_…)"


def _must_exist(protocol: str, shown: str) -> None:
    from fsspec import available_protocols

    known = available_protocols()
    if protocol not in known:
        raise StorageError(
            "storage.protocol_unknown",
            '{url}: the protocol "{protocol}" is not known. {hint}',
            url=shown,
            protocol=protocol,
            hint=nearest(protocol, known),
        )
