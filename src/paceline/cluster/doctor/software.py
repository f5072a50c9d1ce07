"""Findings about the software that is installed and configured for training."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.cluster.cluster import Host
from paceline.cluster.doctor.checks import Finding
from paceline.device import CPU, DEVICE_VARIABLE, VISIBLE
from paceline.torch_versions import OLDEST, newer_than_tested, release

_EXTRAS = {
    "data": (("sklearn", "PIL", "pyarrow"), "digits, image folders, Parquet"),
    "hf": (("transformers",), "Hugging Face models"),
    "tensorboard": (("tensorboard",), "TensorBoard events of every run"),
}
# of an accelerator, and what is so without it
_CAPABILITIES = {
    "collectives": ("collectives", "one rank only, as ranks cannot send each other what is on the devices"),
    "bf16": ("bf16", "precision: fp32 or fp16 in the job"),
    "streams": ("streams", "copies for checkpoints wait their turn in the queue of the computation"),
    "timed_events": ("timed events", "parts of a step are timed by the host, which runs ahead of the device"),
    "pinned_memory": ("pinned memory", "the host waits while a batch is copied to the device"),
    "memory_counted": ("memory counted", "runs and benchmarks are without the devices' memory"),
    "fused_optimizers": ("fused steps", "fused=on takes the ordinary ones"),
    "graphs": ("graphs", "compile=reduce-overhead is refused"),
    "float64": ("float64", "precision=fp64 is refused, and `check` compares in it only on the CPU"),
    "flash_attention": ("flash attention", "cp computes attention by matrices, which takes more memory"),
    "batch_norm_kernels": ("SyncBatchNorm", "batch_norm: sync is computed by plain operations"),
}
_REPORT = ("jinja2",)
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def check_software(host: Host, torch: Mapping[str, Any] | str) -> Iterator[Finding]:
    """Torch, the compiler, the extras. `torch` is what `Probe.torch` says, or why there is no answer."""
    yield Finding("ok", "Python", f"{platform.python_version()} ({platform.platform(terse=True)})")
    if isinstance(torch, str):
        yield Finding("problem", "torch", torch, "install it again: https://pytorch.org/get-started/locally")
    else:
        yield from _torch(torch)
        yield from _torch_and_gpus(torch, host)
    yield _compiler()
    yield from _packages()


def check_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Environment variables that would mislead a run."""
    found = [Finding("note", "variables", text, advice) for text, advice in _misleading(environ)]
    yield from found or [Finding("ok", "variables", "none that misleads a run")]


def _torch(torch: Mapping[str, Any]) -> Iterator[Finding]:
    text = f"{torch['version']}, {torch['built_for']}, code for {torch['capability']}"
    if release(torch["version"]) < OLDEST:
        text += f": paceline needs {'.'.join(map(str, OLDEST))} or newer"
        yield Finding("problem", "torch", text, "pip install -U torch")
    elif not torch["gloo"]:
        text += ": built without gloo, over which ranks talk"
        yield Finding("problem", "torch", text, "install a build of torch that has it")
    elif newer := newer_than_tested(torch["version"]):
        text, _, advice = newer.partition(". If something fails: ")
        yield Finding("note", "torch", text, advice)
    else:
        yield Finding("ok", "torch", text)


def _torch_and_gpus(torch: Mapping[str, Any], host: Host) -> Iterator[Finding]:
    there, usable = len(host.gpus), torch["devices"]
    if usable >= there:
        return
    text = f"torch can use {usable} of {there} GPUs"
    without = f"or set {DEVICE_VARIABLE}={CPU} to train on the CPU"
    if torch["built_for"] == "CPU only":
        advice = f"install a build for them: https://pytorch.org/get-started/locally; {without}"
        yield Finding("problem", "torch for GPUs", f"{text}: it is built for the CPU only", advice)
    else:
        advice = (
            f"see what `python -c 'import torch; torch.empty(1, device=\"{host.kind}\")'` says (is the driver too old "
            f"for {torch['built_for']}?); {without}"
        )
        yield Finding("problem", "torch for GPUs", text, advice)


def check_capabilities(can: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about what torch can do on this machine's accelerators; `can` is that of `Probe.torch`."""
    for name, (topic, without) in _CAPABILITIES.items():
        if can.get(name):
            yield Finding("ok", topic, str(can[name]) if isinstance(can[name], str) else "yes")
        else:
            yield Finding("note", topic, f"no: {without}")


def _compiler() -> Finding:
    """Finding about the compiler that torch.compile needs: CXX or g++, and Python.h."""
    compiler = os.environ.get("CXX") or "g++"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    needed = {f"{compiler} (C++ compiler)": shutil.which(compiler), str(headers): headers.exists()}
    missing = [name for name, there in needed.items() if not there]
    if missing:
        advice = "apt install g++ python3-dev (Debian, Ubuntu), or leave compile out of the plan"
        return Finding("note", "torch.compile", f"missing: {' and '.join(missing)}", advice)
    return Finding("ok", "torch.compile", f"{compiler} and Python's headers are there")


def _packages() -> Iterator[Finding]:
    absent = {extra: [p for p in packages if not _installed(p)] for extra, (packages, _) in _EXTRAS.items()}
    for extra, packages in absent.items():
        if packages:
            text = f"without {', '.join(packages)}: no {_EXTRAS[extra][1]}"
            yield Finding("note", f"extra {extra}", text, f"pip install 'paceline[{extra}]'")
    there = [extra for extra, packages in absent.items() if not packages]
    if there:
        yield Finding("ok", "extras", f"{', '.join(there)} {'are' if len(there) > 1 else 'is'} installed")
    if missing := [p for p in _REPORT if not _installed(p)]:
        text = f"without {', '.join(missing)}: no report.html"
        yield Finding("note", "reports", text, f"pip install {' '.join(missing)}")


def _misleading(environ: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Effects of misleading variables, each with advice."""
    if "RANK" in environ:
        text = f"RANK={environ['RANK']}: `paceline train` takes itself for a rank of a torchrun"
        yield text, "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT, unless torchrun set them"
    for name in filter(environ.get, _THREADS):
        text = f"{name}={environ[name]}: paceline sets its own for the ranks it starts; loops of your own take this one"
        yield text, f"unset {name}, or choose threads in the plan"
    for name in filter(environ.get, _BINDING):
        text = f"{name}={environ[name]} can bind all ranks to the same cores"
        yield text, f"unset {name}; the plan has pin=on"
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield "CUDA_LAUNCH_BLOCKING: every kernel is waited for, which is slow", "unset CUDA_LAUNCH_BLOCKING"
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        text = "TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective, which is slow"
        yield text, "unset TORCH_DISTRIBUTED_DEBUG"
    for name in filter(environ.__contains__, VISIBLE):
        yield f"{name}={environ[name]}: only these GPUs are used", None
    if environ.get(DEVICE_VARIABLE) == CPU:
        yield f"{DEVICE_VARIABLE}={CPU}: ranks run on the cores", f"unset {DEVICE_VARIABLE} to use GPUs"


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
