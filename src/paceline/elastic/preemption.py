"""Notices of preemption in the metadata of a cloud, which become SIGTERM for this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.errors import LaunchError
from paceline.extensions import ExtensionPoint
from paceline.text import printable

PREEMPTION = "PACELINE_PREEMPTION"  # name of the source to poll
_POLL_S, _TIMEOUT_S = 1.0, 2.0


@dataclass(frozen=True)
class NoticeSource:
    """Source of notices that a host will be taken away.

    Attributes:
        is_pending: function that returns True once there is a notice. It is called once a second in a thread, and
            raises OSError if the source does not answer.
    """

    is_pending: Callable[[], bool]


def _is_pending_on_aws() -> bool:
    """See "Spot Instance interruption notices" and "Use IMDSv2" in the user guide of Amazon EC2."""
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token = _answer(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    return bool(_answer(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))


def _is_pending_on_gcp() -> bool:
    """See "Create and use Spot VMs" in the documentation of Compute Engine."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/preempted"
    return _answer(url, {"Metadata-Flavor": "Google"}).strip() == "TRUE"


def _answer(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """Return the text at a URL of the metadata; "" if there is none."""
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    opener = build_opener(ProxyHandler({}))  # a host's metadata is not behind a proxy
    try:
        with opener.open(Request(url, headers=headers, method=method), timeout=_TIMEOUT_S) as response:
            return str(response.read(4096).decode(errors="replace"))
    except HTTPError as error:
        if error.code == 404:
            return ""
        raise


_BUILT_IN = {"aws": NoticeSource(_is_pending_on_aws), "gcp": NoticeSource(_is_pending_on_gcp)}
SOURCES = ExtensionPoint("source of preemption notices", "paceline.preemption", NoticeSource, _BUILT_IN, LaunchError)


@contextmanager
def preemption_notices() -> Iterator[None]:
    """Send SIGTERM to this process if a notice appears while the context is open.

    `PACELINE_PREEMPTION` names the source of notices. Without the variable, nothing is polled.

    Raises:
        LaunchError: the source is unknown, or cannot be loaded.
    """
    name = os.environ.get(PREEMPTION)
    if not name:
        yield
        return
    closing = threading.Event()
    poller = threading.Thread(
        target=_poll, args=(name, SOURCES[name], closing), name="paceline-preemption", daemon=True
    )
    poller.start()
    try:
        yield
    finally:
        closing.set()


def _poll(name: str, source: NoticeSource, closing: threading.Event) -> None:
    answers = True
    while not closing.wait(_POLL_S):
        try:
            is_pending = source.is_pending()
        except Exception as error:  # noqa: BLE001 - a package's source may raise anything, and the run continues
            if answers:
                _say(f"note: the source of preemption notices {name} does not answer: {error}")
            answers = False
            continue
        answers = True
        if is_pending and not closing.is_set():
            _say(f"{name}: this host will be taken away")
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _say(text: str) -> None:
    print(printable(f"paceline: {text}"), file=sys.stderr, flush=True)
