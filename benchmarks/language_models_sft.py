"""Supervised fine-tuning beside TRL's SFTTrainer and a loop over transformers and peft.

    python benchmarks/language_models_sft.py [--rounds N] [--steps N] [--json]

All train the same model in fp32 on the same conversations in the same order: lines of Python and of its documentation,
which the assistant classifies. Only the assistant's turns are trained. AdamW, a constant learning rate, and gradients
clipped to a norm of 1. TRL tokenizes the conversations itself; the loop gets tensors that are made before. TRL has an
environment of its own, made once, with the same versions of torch and transformers.

Losses are compared on the pretrained Llama of the recipes (1.3 million parameters), times and memory on a Llama of 17
million parameters with random weights and a vocabulary of 16,384.

Figures:
- `sft_loss_difference_to_trl`, `lora_loss_difference_to_peft_loop`: largest difference of a loss in 50 steps.
- `sft_two_ranks_difference`, `lora_two_ranks_difference`: the same between dp=2 and one process.
- `step_to_trl`, `lora_step_to_trl`: time of a step / TRL's; medians of runs that take turns, each the median of its
  steps after the first. One process with all cores, both with padded batches.
- `memory_to_trl`, `lora_memory_to_trl`: the largest proportional set size of all processes of a run / TRL's.
- `step_to_plain_loop`, `lora_step_to_plain_loop`: time of a step / the loop's; both train on the same packed sequences.
- `padded_step_to_plain_loop`: the same with padded batches.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from language_models_peers import Task
from measure import environment_line, parser_of, print_figures
from paceline.files import write_whole
from paceline.job.job import Job
from paceline.planning.plan import Plan
from paceline.run import build
from paceline.run.record.run import Run
from paceline.stats import Interval, median_interval
from paceline_lab.systems.started import python_of
from paceline_lab.systems.system import System

sys.path.append(str(Path(__file__).parents[1] / "examples" / "finetune"))
import make_small

CONTEXT, BATCH, VOCABULARY = 256, 8, 16_384
RATES = {"sft": 1e-4, "lora": 1e-3}
LORA = {"r": 8, "alpha": 16}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WORKS = ("sft", "lora")
PACELINE, TRL, LOOP = "paceline", "trl", "loop"
_EVERY_S = 0.25


@dataclass(frozen=True)
class Trained:
    """One run of one system."""

    losses: list[float]
    step_s: float
    memory_bytes: int


def main() -> None:
    """Compare losses, then times and memory, and print tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each system that are timed")
    parser.add_argument("--steps", type=int, default=50, help="steps whose losses are compared")
    options = parser.parse_args()
    print(environment_line())
    figures = sft_figures(options.rounds, options.steps)
    for name, value in figures.items():
        print(f"{name:36} {value:.3g}")
    if options.json:
        print_figures(figures)


def sft_figures(rounds: int, steps: int) -> dict[str, float]:
    """Return the figures.

    Args:
        rounds: number of runs of each system that are timed.
        steps: number of steps whose losses are compared.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-sft-") as name:
        figures = loss_differences(Bench(Path(name, "small")), steps)
        return figures | speeds(Bench(Path(name, "large"), large=True), rounds)


def loss_differences(bench: Bench, steps: int) -> dict[str, float]:
    """Compare the losses of all systems, and print the largest differences."""
    figures = {}
    for work in WORKS:
        ours = bench.train(PACELINE, work, steps).losses
        others = {
            "TRL": bench.train(TRL, work, steps).losses,
            "plain loop": bench.train(LOOP, work, steps).losses,
            "dp=2": bench.train(PACELINE, work, steps, plan="dp=2").losses,
        }
        print(f"\n{work}: losses of {steps} steps, {ours[0]:.4f} to {ours[-1]:.4f}; largest difference to")
        differences = {
            label: max(abs(a - b) for a, b in zip(ours, other, strict=True)) for label, other in others.items()
        }
        for label, difference in differences.items():
            print(f"  {label:12} {difference:.1e}", flush=True)
        figures[f"{work}_loss_difference_to_trl"] = differences["TRL"]
        figures[f"{work}_loss_difference_to_peft_loop"] = differences["plain loop"]
        figures[f"{work}_two_ranks_difference"] = differences["dp=2"]
    figures["sft_loss_difference_to_loop"] = figures.pop("sft_loss_difference_to_peft_loop")
    return figures


def speeds(bench: Bench, rounds: int, steps: int = 8) -> dict[str, float]:
    """Let all systems take turns, and return ratios of times and of memory."""
    ways = [
        (system, work, packed)
        for work in WORKS
        for packed in (False, True)
        for system in (PACELINE, TRL, LOOP)
        if not (packed and system == TRL)  # TRL packs only with FlashAttention, which needs a GPU
    ]
    found: dict[tuple[str, str, bool], list[Trained]] = {way: [] for way in ways}
    for number in range(rounds):
        for system, work, packed in ways[:: -1 if number % 2 else 1]:
            found[system, work, packed].append(bench.train(system, work, steps, packed=packed))
    print(f"\n{'median of ' + str(rounds) + ' runs (95 % interval)':32}{'step, ms':>28}{'memory, MB':>28}")
    for (system, work, packed), runs in found.items():
        step = median_interval([run.step_s * 1e3 for run in runs])
        memory = median_interval([run.memory_bytes / 1e6 for run in runs])
        name = f"{work}, {system}{', packed' if packed else ''}"
        print(f"{name:32}{_rounded(step):>28}{_rounded(memory):>28}")
    figures: dict[str, float] = {}
    for work in WORKS:
        prefix = "" if work == "sft" else f"{work}_"
        ours, ours_packed = found[PACELINE, work, False], found[PACELINE, work, True]
        trl, loop, loop_packed = found[TRL, work, False], found[LOOP, work, False], found[LOOP, work, True]
        ratios = {
            "step_to_trl": _ratio(ours, trl, "step_s"),
            "memory_to_trl": _ratio(ours, trl, "memory_bytes"),
            "step_to_plain_loop": _ratio(ours_packed, loop_packed, "step_s"),
            "padded_step_to_plain_loop": _ratio(ours, loop, "step_s"),
            "memory_to_plain_loop": _ratio(ours_packed, loop_packed, "memory_bytes"),
        }
        for name, ratio in ratios.items():
            print(f"{prefix + name:36} {ratio}")
            figures[prefix + name] = ratio.middle
    return figures


def _ratio(ours: list[Trained], others: list[Trained], of: str) -> Interval:
    return median_interval([getattr(a, of) / getattr(b, of) for a, b in zip(ours, others, strict=True)])


def _rounded(interval: Interval) -> str:
    return f"{interval.middle:.0f} ({interval.low:.0f} to {interval.high:.0f})"


class Bench:
    """A model, conversations, and the ways to train on them."""

    def __init__(self, folder: Path, *, large: bool = False) -> None:
        self.folder = folder
        self.model, self.chat = folder / "base", folder / "chat.jsonl"
        make_small.make(folder, steps=0 if large else 100)
        if large:
            _make_large(folder / "base")
        peers = System(name="trl", title="TRL", documentation="", requirements=("trl.txt",))
        self.python = python_of(peers, lambda line: print(line, file=sys.stderr, flush=True))
        for packed in (False, True):
            self._write_samples(packed)
        self._write_adapters()

    def train(self, system: str, work: str, steps: int, *, packed: bool = False, plan: str = "dp=1") -> Trained:
        """Train with `paceline train`, with TRL, or with a plain loop."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            if system != PACELINE:
                return self._peer(self._task(system, work, steps, packed=packed, folder=name))
            job = Path(name, "job.yaml")
            write_whole(job, json.dumps(self._job(work, steps, packed=packed)))  # JSON is YAML
            words = [sys.executable, "-m", "paceline", "train", str(job), "--plan", plan, "--run", f"{name}/run"]
            _, memory = _watched(words)
            run = Run(f"{name}/run")
            return Trained(run.losses, statistics.median([line["step_s"] for line in run.steps()][1:]), memory)

    def _peer(self, task: Task) -> Trained:
        script = str(Path(__file__).with_name("language_models_peers.py"))
        out, memory = _watched([str(self.python), script, json.dumps(vars(task))])
        found = json.loads(out.splitlines()[-1])
        return Trained(found["losses"], statistics.median(found["times"]), memory)

    def _task(self, system: str, work: str, steps: int, *, packed: bool, folder: str) -> Task:
        lora = {"r": LORA["r"], "lora_alpha": LORA["alpha"], "target_modules": TARGETS}
        return Task(
            system=system,
            model=str(self.model),
            chat=str(self.chat),
            samples=str(self._samples(packed)),
            context=CONTEXT,
            batch=BATCH,
            steps=steps,
            lr=RATES[work],
            lora=lora if work == "lora" else None,
            adapters=str(self.folder / "adapters.safetensors"),
            folder=folder,
        )

    def _job(self, work: str, steps: int, *, packed: bool) -> dict[str, Any]:
        job = {
            "task": "sft",
            "model": {"hf": str(self.model)},
            "data": {"kind": "chat", "path": str(self.chat), "context": CONTEXT, "pack": packed, "held_out": 0},
            "partition": {"shuffle": False},
            "optimizer": {"name": "adamw", "lr": RATES[work], "weight_decay": 0.0},
            "clip_norm": 1.0,
            "global_batch": BATCH,
            "stop": {"steps": steps},
        }
        return {**job, "adapter": {"lora": {**LORA, "targets": TARGETS}}} if work == "lora" else job

    def _samples(self, packed: bool) -> Path:
        return self.folder / ("packed.pt" if packed else "padded.pt")

    def _write_samples(self, packed: bool) -> None:
        data = Job(**self._job("sft", 1, packed=packed)).data.build(input_shape=None, seed=0).train
        samples = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        named = [s if isinstance(s, dict) else dict(zip(("input_ids", "labels"), s, strict=True)) for s in samples]
        torch.save({key: torch.stack([sample[key] for sample in named]) for key in named[0]}, self._samples(packed))

    def _write_adapters(self) -> None:
        from safetensors.torch import save_file

        model = build.built(Job(**self._job("lora", 1, packed=False)), Plan.parse("dp=1"))
        assert isinstance(model, torch.nn.Module)
        first = {
            f"base_model.model.{name.replace('.default', '')}": parameter.detach().contiguous()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        save_file(first, self.folder / "adapters.safetensors")


def _make_large(folder: Path) -> None:
    """Replace the model by a larger one with random weights, and its tokenizer by one with more tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = [*make_small.documentation(), *make_small.source_code()]
    tokenizer = make_small.save_tokenizer(texts, folder, vocab=VOCABULARY)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2 * CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(make_small.END),
        pad_token_id=tokenizer.token_to_id(make_small.PAD),
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _watched(words: list[str]) -> tuple[str, int]:
    """Run a command; return its output and the largest proportional set size of its processes together."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=out, stderr=errors, env=environment)
        peak, watched = 0, psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, _proportional_bytes(watched))
            time.sleep(_EVERY_S)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{out.read()[-2000:]}\n{errors.read()[-4000:]}")
        return out.read(), peak


def _proportional_bytes(process: psutil.Process) -> int:
    total = 0
    with suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with suppress(OSError):  # the process has just ended
                lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


if __name__ == "__main__":
    main()
