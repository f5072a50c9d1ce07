"""Kernel launches and host waits of each loop on the simulated accelerator, compared with a plain loop.

    python benchmarks/overhead_launches.py [--json]

The loops are `paceline train`, `engine.step`, and `engine.backward` with `engine.update`. Each loop runs on one rank,
with and without clipping. The plain loop has the same model, a fused optimizer, torch's clipping and pinned batches,
and reads no numbers. The simulated accelerator (`tests/simulated`) counts calls, and measures no time.

Figures:
- `host_waits_per_step`: waits in the steady state that occur even if the device keeps pace with the host, or that leave
  the device without work. The worst loop counts. If the device falls behind, the host also waits for the numbers of the
  previous step, while the device computes the queued step. Only the table shows these waits.
- `extra_launches_per_step`: kernels and copies that a step launches in addition to the plain loop's; the worst loop
  counts.
"""

from __future__ import annotations

import sys
from pathlib import Path


def launch_figures() -> dict[str, float]:
    """Count the launches and waits of each loop, print a table, and return the figures."""
    # `tests` has a package `simulated`, the accelerator; `benchmarks` has a script of the same name
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from simulated.environment import simulated_environment
    from simulated_steps import STEPS, counts_of_a_step

    device, extra, waits = simulated_environment(devices=1), [0.0], [0.0]
    print("                            launches  beyond plain  waits: always  device idle  for previous step")
    for clips in (False, True):
        counts = counts_of_a_step(device, clips=clips)
        plain = counts["plain"]
        for name, of in counts.items():
            waits.append(max(of.eager_waits, of.idle_waits))
            extra.append(of.launches - plain.launches)
            print(
                f"  {name + (', clipping' if clips else ''):24}{of.launches:10g}{extra[-1]:14g}{of.eager_waits:15g}"
                f"{of.idle_waits:13g}{of.waits - of.idle_waits:19g}"
            )
            for line, times in of.lines.items() if of.idle_waits or of.eager_waits else ():
                print(f"    {times / STEPS:g} per step: {line}")
    return {"host_waits_per_step": max(waits), "extra_launches_per_step": max(extra)}


def main() -> None:
    """Print the table; with --json, print the figures as JSON in the last line."""
    from measure import environment_line, parser_of, print_figures

    arguments = parser_of(__doc__).parse_args()
    figures = launch_figures()
    print(environment_line())
    if arguments.json:
        print_figures(figures)


if __name__ == "__main__":
    main()
