"""Program of a host process in tests: it tells its place, and ends as its word says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from paceline.cluster.launch_engines import own_engine
from paceline.wire.key import own_key

STOP = Path("stop")  # made by host 0, for the others


def main(word: str) -> int:
    place = own_engine().hosts()
    assert place is not None
    key = own_key()
    assert key is not None
    mine = Path(f"host-{place.number}")
    told = {
        "place": [place.number, place.count, place.coordinator, place.engine],
        "key": key.fingerprint,
        "devices": os.environ.get("PACELINE_HOST_DEVICES"),
        "pid": os.getpid(),
        "secret_in_sight": any(
            b"PRIVATE" in Path(f"/proc/{pid}/{file}").read_bytes()
            for pid in ("self", os.getppid())
            for file in ("cmdline", "environ")
        ),
    }
    signals: list[str] = []

    def note(number: int, _: FrameType | None) -> None:
        os.write(1, b"said while its connection may be lost\n")  # `print` may be under way
        signals.append(signal.Signals(number).name)
        mine.with_suffix(".signals").write_text(" ".join(signals))

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    mine.with_suffix(".new").write_text(json.dumps(told))
    mine.with_suffix(".new").rename(mine)
    print(f"out {place.number}", flush=True)
    print(f"err {place.number}", file=sys.stderr, flush=True)
    if word == "wait":
        while not signals and not STOP.exists():
            time.sleep(0.01)
        if place.number == 0:
            STOP.touch()
    return 7 if place.number == 0 else 9


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
