"""Failure of a rank that torchrun has started.

Its error is on the screen and in torchrun's own report, and it waits for nobody.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from paceline.launch.failure import ErrorRecord
from paceline.printable import printable
from paceline.rank_environment import own_rank


def fail(error: Exception) -> NoReturn:
    """Tell of `error`, caught now, and end this rank with exit code 1."""
    record = ErrorRecord.of(error, own_rank())
    text = record.text(ranks=1)  # what became of the others is torchrun's to tell
    with suppress(OSError):  # whoever read it has gone, or the disk is full: what is left is the exit code
        print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            facts = {"py_callstack": text.splitlines()[0], "timestamp": str(int(record.time))}
            Path(report).write_text(json.dumps({"message": {"message": text, "extraInfo": facts}}))
    os._exit(1)  # a thread that still waits for a peer must not keep a failed rank alive
