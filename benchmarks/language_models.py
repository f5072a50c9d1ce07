"""All figures about language models: fine-tuning beside TRL, the loss in chunks, Muon, and loading a checkpoint.

    python benchmarks/language_models.py [--rounds N] [--json]

Each part is a script of its own, whose help explains its figures: language_models_sft.py, language_models_loss.py,
language_models_muon.py and language_models_load.py.
"""

from __future__ import annotations

import language_models_load
import language_models_loss
import language_models_muon
import language_models_sft
from measure import environment_line, parser_of, print_figures


def main() -> None:
    """Measure one part after the other."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each system that are timed")
    options = parser.parse_args()
    print(environment_line())
    figures = {
        **language_models_sft.sft_figures(options.rounds, steps=50),
        **language_models_loss.loss_figures(steps=10),
        **language_models_muon.measure(),
        **language_models_load.figures(language_models_load.measure_loading()),
    }
    for name, value in figures.items():
        print(f"{name:36} {value:.3g}")
    if options.json:
        print_figures(figures)


if __name__ == "__main__":
    main()
