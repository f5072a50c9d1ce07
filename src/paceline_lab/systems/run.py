"""Entry point of one process of a compared system: `python -m paceline_lab.systems.run MODULE:FUNCTION FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.job.spec import load_object
from paceline_lab.systems.work import Work


def main() -> None:
    """Call a system's training function with the task in a folder, and write its results."""
    work = Work(Path(sys.argv[2]))
    load_object(sys.argv[1])(work)
    work.write()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all results are written, and torch's cleanup at interpreter exit occasionally aborts or hangs


if __name__ == "__main__":
    main()
