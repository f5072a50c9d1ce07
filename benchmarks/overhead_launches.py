"""Launches and waits of a step of each loop on the simulated accelerator, beside the plain loop.

    python benchmarks/overhead_launches.py [--json]

The loops are `paceline train`, `engine.step` and `engine.backward` with `engine.update`, each with and without
clipping, on one rank. The plain loop has the same model, a fused optimizer, torch's clipping and pinned batches, and
reads no number. The simulated accelerator is that of `tests/simulated`. It counts calls, and measures no time.

Figures:
- `host_waits_per_step`: waits of the host that any device would cause, or that leave the device without work, in the
  steady state. On a device that runs behind, the host also waits for the numbers of the step before, while the device
  computes the step that is already queued; these waits are in the table.
- `extra_launches_per_step`: kernels and copies that a step launches beyond the plain loop, in the worst of the loops.
"""

from __future__ import annotations

import sys
from pathlib import Path


def launch_figures() -> dict[str, float]:
    """Count the launches and waits of each loop, print a table, and return the figures."""
    # There `simulated` is the accelerator's package, and here a script.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from simulated.environment import simulated_environment
    from simulated_steps import STEPS, counts_of_a_step

    device, extra, waits = simulated_environment(devices=1), [0.0], [0.0]
    print("                            launches  beyond plain  waits: always  that idle  for the step before")
    for clips in (False, True):
        counts = counts_of_a_step(device, clips=clips)
        plain = counts["plain"]
        for name, of in counts.items():
            waits.append(max(of.eager_waits, of.idle_waits))
            extra.append(of.launches - plain.launches)
            print(
                f"  {name + (', clipping' if clips else ''):24}{of.launches:10g}{extra[-1]:14g}{of.eager_waits:15g}"
                f"{of.idle_waits:11g}{of.waits - of.idle_waits:21g}"
            )
            for line, times in of.lines.items() if of.idle_waits or of.eager_waits else ():
                print(f"    {times / STEPS:g} a step: {line}")
    return {"host_waits_per_step": max(waits), "extra_launches_per_step": max(extra)}


def main() -> None:
    """Print the table, and with --json a last line for machines."""
    from measure import environment_line, parser_of, print_figures

    arguments = parser_of(__doc__).parse_args()
    figures = launch_figures()
    print(environment_line())
    if arguments.json:
        print_figures(figures)


if __name__ == "__main__":
    main()
