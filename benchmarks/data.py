"""Data loading compared with mosaicml-streaming, litdata, webdataset, grain and Hugging Face datasets.

    python benchmarks/data.py [--json] [--quick] [--part NAME …] [--folder DIR]

Each system loads the same records, in the format and with the settings that its documentation recommends: shuffled,
with the same batch size, by 1 and by 2 loader processes. The peers run in their own environment, which is created once.
The decoded samples of all systems are compared before anything is timed. The systems take turns by epoch, and ratios
are of neighbouring epochs. `--quick` takes smaller corpora and fewer repeats, so its figures mean little.

Parts and figures:
- `speed`: `samples_to_best_peer_WORK`, our samples/s divided by the samples/s of the fastest peer; the smaller ratio of
  1 and 2 loader processes. WORK is text (JSONL to tokens), tokens (Parquet), images (folder of JPEGs) or tars (of
  JPEGs). `samples_to_best_peer` is the smallest of these figures.
- `resume`: `resume_s`, seconds from opening the data to the first batch at sample 9 million of 10 million, in a new
  process; `resume_s_PEER` of the peers. `resume_equal` is 1 if the batch has the samples of an uninterrupted epoch.
- `bytes`: `bytes_to_share`, bytes fetched / share of the corpus over an epoch, of the worst rank of 1 to 8.
- `memory`: `memory_growth_mb` of the rank over 1 million steps, after a warm-up.
- `exact`: `epoch_exact`, 1 if each sample was read exactly once per epoch in each of 200 random sequences of kills and
  resizes of 1 to 8 ranks; `epoch_exact_runs`, the same for training runs whose ranks are killed.
- `packed`: `packed_loss_difference` and `packed_gradient_difference` in float64 between documents packed and alone, and
  `packed_useful_to_padded`, labels per position of a batch, packed / padded.
- `waiting`: `waiting_share` of a training loop over S3 with 5 % of requests failing and 200 ms latency, beyond the
  waiting of the same loop on local files, whose share is `receiving_share`; `opened_s`, seconds to open the files in
  the store.
- `size`: what a corpus of 10 TB costs, computed from measurements: memory, bytes of index and seconds to start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import data_limits
import data_order
import data_resume
import data_s3
import data_speed
from measure import environment_line, parser_of, print_figures

Part = Callable[[Path, bool], Mapping[str, float]]
PARTS: dict[str, Part] = {
    "speed": data_speed.measured,
    "resume": data_resume.measured,
    "bytes": data_s3.bytes_measured,
    "memory": data_order.memory_measured,
    "exact": data_order.exact_measured,
    "packed": data_limits.packed_measured,
    "waiting": data_s3.waiting_measured,
    "size": data_limits.size_measured,
}


def main() -> None:
    """Measure, print the tables, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=[*PARTS], help="measure only these parts")
    parser.add_argument("--quick", action="store_true", help="smaller corpora and fewer repeats")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(__file__).resolve().parents[1] / "build" / "data",
        help="folder that keeps the corpora",
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
