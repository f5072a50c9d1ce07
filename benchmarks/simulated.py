"""Trainings on simulated accelerators, whose queued work runs as late as it may, held to the same ones on the CPU.

    python benchmarks/simulated.py [--json] [--quick] [--only TEXT]

Each case is a plan, a work (a job, or a loop of a user's own) and an order of the streams: late, random or eager. It
trains some steps on 1 to 8 simulated devices; its losses and final parameters are compared with those of the same
plan on the CPU. The simulated accelerator is that of `tests/simulated`.

Figures:
- `cases`: how many were compared.
- `wrong`, `crashed`, `late`: how many had other numbers, an error, or no end.
- `host_waits_per_step`: how often the host waits for the device in a step of our loop (the more of dp=1 and dp=2).
- `waits_before_update`: how many of these are before the update of the step is queued.
- `extra_launches_per_step`: kernels that our step launches beyond the same step in plain PyTorch (dp=1).

`--quick` takes the cases of `make test`, `--only` those whose name has the text in it.
"""

from __future__ import annotations

import sys
from pathlib import Path

# There `simulated` is the accelerator's package: this file is a script, and never imported.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from simulated_report import main

if __name__ == "__main__":
    main(str(__doc__))
