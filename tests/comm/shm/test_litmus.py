"""The fence of shared memory forbids results that a waiting rank must not see, natively and as arm64 code.

QEMU translates code for arm64 to this machine's processor, whose memory order is stronger than that of arm64. A count
of zero under QEMU therefore shows only that the program runs. The order of memory on arm64 is
verified in the instructions of the fence.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("litmus.c")
ARM64_ROOT = Path("/usr/aarch64-linux-gnu")
FENCE = "atomic_thread_fence"


def build(compiler: str, folder: Path) -> Path:
    program = folder / "litmus"
    subprocess.run(
        [compiler, "-std=gnu11", "-O2", "-Wall", "-Werror", "-o", program, SOURCE, "-latomic"], check=True, timeout=60
    )
    return program


def seen(command: list[str | Path], pattern: str, rounds: int) -> int:
    """Return how often the fenced program saw a forbidden result."""
    run = subprocess.run(
        [*command, pattern, "fenced", str(rounds)], capture_output=True, text=True, check=True, timeout=100
    )
    return int(run.stdout)


@pytest.mark.needs_compiler
@pytest.mark.parametrize("pattern", ["publish", "sleep"])
def test_no_process_of_this_machine_sees_an_announcement_before_its_data(pattern: str, tmp_path: Path) -> None:
    assert seen([build("gcc", tmp_path)], pattern, 50_000) == 0


@pytest.mark.needs_arm64_emulation
@pytest.mark.parametrize("pattern", ["publish", "sleep"])
def test_no_emulated_process_sees_an_announcement_before_its_data(pattern: str, tmp_path: Path) -> None:
    program = build("aarch64-linux-gnu-gcc", tmp_path)
    assert seen(["qemu-aarch64", "-L", ARM64_ROOT, program], pattern, 5_000) == 0


@pytest.mark.needs_arm64_emulation
def test_the_function_that_python_calls_is_a_full_barrier_of_arm64(tmp_path: Path) -> None:
    library = ARM64_ROOT / "lib" / "libatomic.so.1"
    code = instructions(library, FENCE)
    assert code, f"{library} has no {FENCE}"
    assert any(re.fullmatch(r"dmb\s+ish", instruction) for instruction in code), code


@pytest.mark.needs_arm64_emulation
def test_the_litmus_test_calls_that_function_and_no_barrier_of_its_own(tmp_path: Path) -> None:
    program = build("aarch64-linux-gnu-gcc", tmp_path)
    publish = instructions(program, "publish")
    assert publish
    assert not [instruction for instruction in publish if instruction.startswith(("dmb", "stlr", "ldar"))]
    symbols = subprocess.run(["aarch64-linux-gnu-nm", "-D", program], capture_output=True, text=True, check=True)
    assert re.search(rf"U {FENCE}\b", symbols.stdout)


def instructions(file: Path, function: str) -> list[str]:
    """Return the instructions of a function, as disassembled."""
    listing = subprocess.run(
        ["aarch64-linux-gnu-objdump", "--disassemble=" + function, "--no-show-raw-insn", file],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return re.findall(r"^\s+[0-9a-f]+:\t(.*?)\s*$", listing.stdout, re.MULTILINE)
