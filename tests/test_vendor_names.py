"""Code asks what a device can do, and never for the name of one maker's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "paceline"
VENDOR = re.compile(r"cuda|nccl", re.IGNORECASE)
# the maker's own variables and tests, by their full names
OWN_NAMES = re.compile(r"\b(?:TORCH_)?(?:CUDA|NCCL)_[A-Z_]+\b|\bPYTORCH_NVML_BASED_CUDA_CHECK\b|\bnccl-tests\b")
EXCEPT = {
    "device.py": "the file about devices",
    "cluster/discover.py": "variables that a run records",
    "cluster/machine.py": "the GPUs of one maker, asked of its driver",
    "cluster/catalogue.py": "a catalogue of makers' devices, with sources",
    "cluster/doctor.py": "advice about one maker's library",
    "errors.py": "what one maker's library writes when a rank was aborted",
    "planning/sync_info.py": "what people write for a transport between GPUs",
}


def vendor_names(source: str) -> Iterator[tuple[int, str]]:
    """Each name and string of a module's code that names a maker's device; docstrings and comments may."""
    if not VENDOR.search(source):  # most modules: taking them apart takes long
        return
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
        if isinstance(text, str) and VENDOR.search(OWN_NAMES.sub("", text)):
            yield getattr(node, "lineno", 1), text
        for field in ("name", "arg", "attr", "id"):
            if isinstance(found := getattr(node, field, None), str) and VENDOR.search(OWN_NAMES.sub("", found)):
                yield getattr(node, "lineno", 1), found


def test_no_code_names_a_makers_device() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {text!r}"
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) not in EXCEPT
        for line, text in vendor_names(path.read_text(encoding="utf-8"))
    ]
    assert not found, "ask paceline.device what the device can do\n" + "\n".join(found)


def test_the_exceptions_are_needed() -> None:
    needless = [file for file in EXCEPT if not list(vendor_names((SOURCE / file).read_text(encoding="utf-8")))]
    assert not needless


def test_names_and_strings_are_found_and_docstrings_are_not() -> None:
    source = (
        '"""CUDA."""\nimport torch\n\nif x.is_cuda or d.type == "cuda":  # not on NCCL\n    f("CUDA_LAUNCH_BLOCKING")\n'
    )
    assert sorted(vendor_names(source)) == [(4, "cuda"), (4, "is_cuda")]
