"""Choices of `--plan auto` for four models on this machine, and the time they take.

Plans and settings, those tried and those chosen.

    python benchmarks/settings.py [--json]

Figures, for each of `cifar_cnn`, `resnet50`, `bert` and `gpt`:
- `gain_MODEL`: step time of the chosen plan over that of the plan that the search begins with, by the ratios measured
  in turn; 1 where nothing was better.
- `seconds_MODEL`: what the choice took, the start of the ranks included. A later start of the same job takes none of
  them.

All data is synthetic. The jobs are of 2,000 steps, to be run ten times; measuring may take a tenth of that, and at most
some seconds.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from measure import environment_line, parser_of, print_figures
from paceline.cluster.discover import discover
from paceline.job.job import Job
from paceline.run.tuning.auto import choose

ADAMW: dict[str, Any] = {"optimizer": {"name": "adamw", "lr": 1e-4}, "stop": {"steps": 2000}, "loss": "cross_entropy"}
IMAGES: dict[str, Any] = {"kind": "synthetic", "samples": 640}
TOKENS: dict[str, Any] = {"kind": "synthetic", "samples": 640, "shape": [128], "vocab": 256}
JOBS: dict[str, dict[str, Any]] = {
    "cifar_cnn": {"model": "cifar_cnn", "data": IMAGES, "global_batch": 64},
    "resnet50": {"model": {"zoo": "resnet50", "args": {"image_size": 64}}, "data": IMAGES, "global_batch": 16},
    "bert": {"model": "bert", "data": TOKENS, "global_batch": 16},
    "gpt": {"model": "gpt", "data": TOKENS, "global_batch": 8},
}


def main() -> None:
    """Choose for each model, as on a first start."""
    parser = parser_of(__doc__)
    as_json = parser.parse_args().json
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # nothing is known from earlier starts, and nothing is kept
        for name, job in JOBS.items():
            print(f"\n{name}, global batch {job['global_batch']}", flush=True)
            choice = choose(Job.model_validate(ADAMW | job), discover(), lambda line: print(line, flush=True), runs=10)
            figures |= {f"gain_{name}": round(choice.gain, 3), f"seconds_{name}": round(choice.seconds, 1)}
    print(f"\n{environment_line()}")
    if as_json:
        print_figures(figures)


if __name__ == "__main__":
    main()
