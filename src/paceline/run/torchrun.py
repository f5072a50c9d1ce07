"""Failure of a rank that another launch engine has started, such as torchrun.

The cause of the error is on the screen and in the engine's own report, the traceback in a file. The rank does not wait
for other ranks.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn

from paceline.cluster.launch_engines import own_engine
from paceline.elastic.failure import ErrorRecord, below
from paceline.printable import printable
from paceline.rank_environment import own_rank


def fail(error: Exception) -> NoReturn:
    """Report the error that is being handled, and end this rank with exit code 1."""
    record = ErrorRecord.of(error, own_rank())
    text = record.cause(ranks=1)  # the engine reports the other ranks
    if record.traceback:
        text += f"\n{below(record.traceback, f'rank-{record.rank}')}"
    with suppress(OSError):  # whoever read it has gone, or the disk is full: what is left is the exit code
        print(f"paceline: {printable(text)}", file=sys.stderr, flush=True)
        own_engine().tell_failure(text, record.time)
    os._exit(1)  # a thread that still waits for a peer must not keep a failed rank alive
