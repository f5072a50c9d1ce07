"""Memory and step time of the cross-entropy in chunks beside whole logits, at a vocabulary of 128,256.

    python benchmarks/language_models_loss.py [--steps N] [--json]

Figures:
- `chunked_loss_peak_to_logits`: peak memory of the head and the loss, forward and backward, in chunks / bytes of the
  whole logits in the dtype of the products. The gradients of the head's weight and input, which remain afterwards with
  whole logits too, are not counted. The larger of bf16 (autocast) and fp32. Every allocated tensor is tracked.
- `whole_loss_peak_to_logits`: the same without chunks.
- `chunked_step_to_whole`: time of a training step in chunks / with whole logits (median of neighbouring steps). Two
  engines with equal models take turns.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

import paceline
from measure import environment_line, parser_of, print_figures
from paceline.job.zoo.losses import CrossEntropy
from paceline.job.zoo.models import GPT
from paceline.run.dry_run.dry_run import MemoryWatch
from paceline.split.cross_entropy import chunked_cross_entropy
from paceline.stats import Interval, median_interval

VOCABULARY, WIDTH, TOKENS = 128_256, 256, 4096


def main() -> None:
    """Measure both, print a table, and with --json a last line for machines."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each way")
    arguments = parser.parse_args()
    figures = loss_figures(arguments.steps)
    print(environment_line())
    for name, value in figures.items():
        print(f"{name:32} {value:.3f}")
    if arguments.json:
        print_figures(figures)


def loss_figures(steps: int) -> dict[str, float]:
    """Return the figures; `steps` is the number of measured steps of each way."""
    ratio = step_ratio(steps)
    print(f"step in chunks / step with whole logits: {ratio}")
    return {
        "chunked_loss_peak_to_logits": max(peak_to_logits(dtype, chunked=True) for dtype in _DTYPES),
        "whole_loss_peak_to_logits": max(peak_to_logits(dtype, chunked=False) for dtype in _DTYPES),
        "chunked_step_to_whole": ratio.middle,
    }


_DTYPES = torch.bfloat16, torch.float32


def peak_to_logits(dtype: torch.dtype, *, chunked: bool) -> float:
    """Return the peak memory of head and loss, relative to whole logits."""
    with FakeTensorMode(), MemoryWatch() as watch:
        hidden, labels = torch.zeros(TOKENS, WIDTH, requires_grad=True), torch.zeros(TOKENS, dtype=torch.long)
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        before = watch.live_bytes
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            if chunked:
                loss = chunked_cross_entropy(hidden, head.weight, None, labels, skips=False).sum()
            else:
                loss = F.cross_entropy(head(hidden), labels)
        loss.backward()
        held = watch.peak_bytes - before
    gradients = (hidden.numel() + head.weight.numel()) * 4
    return float((held - gradients) / (TOKENS * VOCABULARY * dtype.itemsize))


def step_ratio(steps: int) -> Interval:
    """Return the time of a step in chunks relative to one with whole logits."""
    engines = [_engine(chunk) for chunk in ("auto", "off")]
    times: list[list[float]] = [[], []]
    for number in range(steps + 2):
        for i in (0, 1) if number % 2 else (1, 0):
            batch = next(iter(engines[i].loader))
            start = time.perf_counter()
            engines[i].step(batch)
            times[i].append(time.perf_counter() - start)
    for engine in engines:
        engine.close()
    return median_interval([a / b for a, b in zip(times[0][2:], times[1][2:], strict=True)])


def _engine(chunk: Any) -> Any:
    torch.manual_seed(0)
    context, samples = 512, 2
    model = GPT(vocab=VOCABULARY, context=context, layers=2, hidden=WIDTH, heads=4)
    tokens = torch.randint(0, VOCABULARY, (samples, context + 1))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return paceline.setup(model, optimizer, loss=CrossEntropy(chunk=chunk), loader=loader, plan="dp=1")


if __name__ == "__main__":
    main()
