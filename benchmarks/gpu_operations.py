"""Times of single operations on the accelerator here: products, attention, passes over memory, copies, launches.

    python benchmarks/gpu_operations.py --out FILE.csv [--seconds 150]

What products, attention and casts reach (`paceline/planning/cost/constants.py`, `attention.py`) is read off such a
table (`tables/operations_h100.csv`), so that it does not rest on whole runs alone. Each line is one shape: the median
of blocks of calls between two events of the device, on normally distributed numbers (power, and with it the clock,
depends on them). A last line has the clock and power that the driver states under a long product. Lines of an operation
that the device or this torch does not have are left out, and said.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, layer_norm, rms_norm, scaled_dot_product_attention, silu

COLUMNS = ("device", "operation", "precision", "m", "n", "k", "batch", "forward_s", "backward_s", "note")
BLOCKS, BLOCK_S = 5, 0.004
WIDTHS: tuple[tuple[int, int], ...] = (
    (768, 768),
    (3072, 768),
    (1024, 1024),
    (4096, 1024),
    (2048, 2048),
    (8192, 2048),
    (2048, 8192),
)
WIDTHS += ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (10240, 8192), (8192, 8192), (28672, 8192))
WIDTHS += ((8192, 28672), (16384, 16384), (50304, 2048), (128256, 4096), (512, 2048), (1024, 7168), (7168, 2048))
ODD = ((4095, 4096, 4096), (4096, 4100, 4096), (8192, 8200, 8192), (8192, 8192, 8200), (8192, 6145, 4096))
ROWS = (512, 2048, 8192, 16384)
Line = dict[str, Any]


def main() -> None:
    """Measure until the time is over; the most useful first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no accelerator here", file=sys.stderr)
        sys.exit(2)
    until = time.monotonic() + options.seconds
    device = torch.cuda.get_device_name()
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for take in every():
            if time.monotonic() > until:
                print("no time left for the rest")
                break
            try:
                line = take()
            except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError) as error:
                print(f"left out: {str(error).splitlines()[0][:160]}")
                torch.cuda.empty_cache()
                continue
            writer.writerow({"device": device} | line)
        writer.writerow({"device": device} | under_load())
    print(f"written: {options.out}")


def every() -> Iterator[Callable[[], Line]]:
    """All measurements, in the order of their use."""
    for precision in ("bf16", "fp8-tensor", "fp8-row"):
        for rows in ROWS:
            for n, k in WIDTHS:
                yield partial(product, precision, rows, n, k)
    for m, n, k in ODD:
        yield partial(product, "bf16", m, n, k)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for length in (512, 1024, 2048, 4096, 8192, 16384, 32768):
            for width in (64, 128):
                yield partial(attention, backend, length, width, causal=True)
        for length in (512, 4096, 16384):
            yield partial(attention, backend, length, 128, causal=False)
    for experts, rows in ((8, 4096), (8, 512), (32, 512), (64, 256), (128, 128)):
        for n, k in ((2048, 7168), (7168, 2048), (14336, 4096), (768, 2048)):
            yield partial(grouped, experts, rows, n, k)
    for name in ("add", "copy", "layer_norm", "rms_norm", "silu_multiply", "softmax", "cast"):
        for numbers in (2**18, 2**21, 2**24, 2**27):
            yield partial(passing, name, numbers)
    for tokens, vocab in ((2048, 50304), (8192, 50304), (8192, 128256)):
        yield partial(loss, tokens, vocab)
    for kind in ("fused", "foreach"):
        for numbers in (10**7, 10**8, 10**9):
            yield partial(update, kind, numbers)
    for way in ("to device", "to host"):
        yield partial(copied, way)
    for rows, n, k in ((1024, 1024, 1024), (8192, 8192, 8192)):
        for precision in ("tf32", "fp32"):
            yield partial(product, precision, rows, n, k)
    yield launches


def seconds(run: Callable[[], object]) -> float:
    """Median seconds of a call, from blocks of at least `BLOCK_S`."""
    run()
    torch.cuda.synchronize()
    once, calls = _block(run, 2), 2
    calls = max(2, min(2000, round(BLOCK_S / max(once, 1e-7))))
    return statistics.median(_block(run, calls) for _ in range(BLOCKS))


def _block(run: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def product(precision: str, m: int, n: int, k: int) -> Line:
    """(m × k) · (k × n); of fp8, products whose scales are known, and the cast to fp8 as its own line."""
    line: Line = {"operation": "product", "precision": precision, "m": m, "n": n, "k": k}
    if precision.startswith("fp8"):
        a = torch.randn(m, k, device="cuda").clamp(-3, 3).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device="cuda").clamp(-3, 3).to(torch.float8_e4m3fn).t()
        by_row = precision == "fp8-row"
        scale_a = torch.ones((m, 1) if by_row else (), device="cuda")
        scale_b = torch.ones((1, n) if by_row else (), device="cuda")
        scaled = torch._scaled_mm
        return line | {
            "forward_s": seconds(
                lambda: scaled(
                    a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=not by_row
                )
            )
        }
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(*size, device="cuda", dtype=dtype) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    return line | {"forward_s": seconds(lambda: torch.mm(a, b, out=out))}


def grouped(experts: int, rows: int, n: int, k: int) -> Line:
    """One product for each expert of `rows` rows: in one kernel where torch has it."""
    a = torch.randn(experts * rows, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(experts, k, n, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * rows
    run = torch._grouped_mm
    found = seconds(lambda: run(a, b, offs=ends))
    return {
        "operation": "grouped", "precision": "bf16", "m": rows, "n": n, "k": k, "batch": experts, "forward_s": found
    }  # fmt: skip


def attention(backend: SDPBackend, length: int, width: int, *, causal: bool) -> Line:
    """Attention of 16 heads or more, about 16,384 tokens, forward and backward."""
    batch, heads = max(1, 16384 // length), 16
    query, keys, values = (
        torch.randn(batch, heads, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with sdpa_kernel(backend):
        forward_s = seconds(lambda: scaled_dot_product_attention(query, keys, values, is_causal=causal))
        out = scaled_dot_product_attention(query, keys, values, is_causal=causal)
        gradient = torch.randn_like(out)
        backward_s = seconds(lambda: torch.autograd.grad(out, (query, keys, values), gradient, retain_graph=True))
    return {
        "operation": "attention", "precision": "bf16", "m": length, "n": width, "k": length, "batch": batch * heads,
        "forward_s": forward_s, "backward_s": backward_s,
        "note": f"{backend.name.lower()}{', causal' if causal else ''}",
    }  # fmt: skip


def passing(name: str, numbers: int) -> Line:
    """Kernels that only read and write, eager, on bf16 rows of 4,096."""
    width = 4096
    x, y = (torch.randn(numbers // width, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    run: dict[str, tuple[Callable[[], object], float]] = {
        "add": (lambda: torch.add(x, y), 3),
        "copy": (lambda: x.clone(), 2),
        "layer_norm": (lambda: layer_norm(x, (width,), weight, weight), 2),
        "rms_norm": (lambda: rms_norm(x, (width,), weight), 2),
        "silu_multiply": (lambda: silu(x) * y, 5),
        "softmax": (lambda: x.softmax(-1), 2),
        "cast": (lambda: x.to(torch.float32), 3),
    }
    call, passes = run[name]
    return {
        "operation": name, "precision": "bf16", "m": numbers // width, "n": width, "batch": passes,
        "forward_s": seconds(call), "note": "batch: numbers of two bytes moved for each element",
    }  # fmt: skip


def loss(tokens: int, vocab: int) -> Line:
    """Cross entropy of logits in fp32, as torch's own."""
    logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), device="cuda")
    forward_s = seconds(lambda: cross_entropy(logits.float(), labels))
    value = cross_entropy(logits.float(), labels)
    backward_s = seconds(lambda: torch.autograd.grad(value, logits, retain_graph=True))
    return {
        "operation": "cross_entropy", "precision": "bf16", "m": tokens, "n": vocab, "forward_s": forward_s,
        "backward_s": backward_s,
    }  # fmt: skip


def update(kind: str, numbers: int) -> Line:
    """AdamW's step on fp32 parameters in tensors of ten million."""
    parameters = [torch.randn(10**7, device="cuda", requires_grad=True) for _ in range(numbers // 10**7)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=kind == "fused", foreach=kind == "foreach")
    found = seconds(optimizer.step)
    del optimizer, parameters
    torch.cuda.empty_cache()
    return {"operation": "adamw", "precision": "fp32", "m": numbers, "forward_s": found, "note": kind}


def copied(way: str) -> Line:
    """1 GiB between pinned memory of the host and the device."""
    here = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    pair = (there, here) if way == "to device" else (here, there)
    found = seconds(lambda: pair[0].copy_(pair[1], non_blocking=True))
    return {"operation": "host_copy", "precision": "uint8", "m": 2**30, "forward_s": found, "note": way}


def launches() -> Line:
    """Python's time for each of many small kernels, forward through autograd and backward."""
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.randn(64, 64, device="cuda")

    def run() -> None:
        y = x
        for _ in range(200):
            y = torch.relu(y + 1)
        y.sum()

    found = seconds(run) / 401

    def trained() -> None:
        y = x
        for _ in range(100):
            y = torch.relu(layer(y))
        y.sum().backward()

    both = seconds(trained) / 100
    return {
        "operation": "launch", "precision": "fp32", "forward_s": found, "backward_s": both,
        "note": "a kernel; linear and relu, forward and backward",
    }  # fmt: skip


def under_load() -> Line:
    """Two seconds of a large product: what lasts, and the clock and power that the driver states then."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    end, times, stated = time.monotonic() + 2.0, [], ""
    while time.monotonic() < end:
        times.append(_block(lambda: torch.mm(a, b), 100))
        try:
            stated = f"{torch.cuda.clock_rate()} MHz, {torch.cuda.power_draw() / 1000:.0f} W"
        except (RuntimeError, ImportError, AttributeError):
            stated = "clock and power not stated"
    return {
        "operation": "under_load", "precision": "bf16", "m": 8192, "n": 8192, "k": 8192,
        "forward_s": statistics.median(times[len(times) // 2 :]), "note": stated,
    }  # fmt: skip


if __name__ == "__main__":
    main()
