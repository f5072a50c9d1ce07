"""Data loading beside mosaicml-streaming, litdata, webdataset, grain and Hugging Face datasets.

    python benchmarks/data.py [--json] [--quick] [--part NAME …] [--folder DIR]

Each system loads the same records as its documentation recommends, in the format that it prefers, with the same batch
size, shuffled, by 1 and by 2 loader processes. The peers run in an environment of their own, which is made once. All
systems' decoded samples are compared before anything is timed. Epochs are interleaved; ratios are of neighbouring ones.
`--quick` takes smaller corpora and fewer repeats, whose figures mean little.

Parts and figures:
- `speed`: `samples_to_best_peer_WORK`, our samples/s / those of the fastest peer, the smaller one of 1 and 2 loader
  processes; WORK is text (JSONL to tokens), tokens (Parquet), images (folder of JPEGs) or tars (of JPEGs).
  `samples_to_best_peer` is the worst of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import data_speed
from measure import environment_line, parser_of, print_figures

Part = Callable[[Path, bool], Mapping[str, float]]
PARTS: dict[str, Part] = {
    "speed": data_speed.measured,
}


def main() -> None:
    """Measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=[*PARTS], help="measure these parts alone")
    parser.add_argument("--quick", action="store_true", help="smaller corpora and fewer repeats")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(__file__).resolve().parents[1] / "build" / "data",
        help="where corpora are kept",
    )
    asked = parser.parse_args()
    figures: dict[str, float] = {}
    for part in asked.part:
        figures |= PARTS[part](asked.folder, asked.quick)
    print(environment_line())
    if asked.json:
        print_figures(figures)


if __name__ == "__main__":
    main()
