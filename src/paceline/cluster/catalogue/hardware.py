"""The catalogue of hardware, looked up by whatever a device is called.

`H100-SXM`, `a100_80gb`, `NVIDIA H100 80GB HBM3`.
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from paceline.cluster.catalogue.accelerator import Accelerator, LinkSpec
from paceline.cluster.catalogue.devices import CATALOGUE
from paceline.errors import ClusterError
from paceline.extensions import ExtensionPoint

__all__ = ["CATALOGUE", "HARDWARE", "Accelerator", "LinkSpec", "accelerator", "known", "nearest_to"]

# With the devices of installed packages, which are named exactly.
HARDWARE = ExtensionPoint("device", "paceline.hardware", Accelerator, CATALOGUE, ClusterError)

# Families by how names spell them; in the order in which they are tried. What follows a number must not be one.
_FAMILIES = {
    "GB200": r"gb200",
    "B200": r"\bb200",
    "H200": r"\bh200",
    "H100": r"\bh100",
    "A100": r"\ba100",
    "V100": r"\bv100",
    "A10G": r"\ba10g",
    "A10": r"\ba10",
    "L40S": r"\bl40s",
    "L4": r"\bl4",
    "A6000": r"\ba6000",
    "RTX-4090": r"\b(?:rtx ?)?4090",
    "RTX-3090": r"\b(?:rtx ?)?3090",
    "T4": r"\bt4",
    "MI300X": r"\bmi300x",
    "MI250X": r"\bmi250x",
    "TPU-v5p": r"\bv5p",
    "TPU-v5e": r"\bv5(?:e|litepod|lite)",
    "CPU": r"\bcpu",
}
_FORMS = {"PCIe": r"\bpcie", "NVL": r"\bnvl\b", "SXM": r"\b(?:sxm|dgx|hgx|hbm3)"}
_MEMORY = re.compile(r"\b(\d{2,3}) ?(?:gi?b?)?\b")
_MAKERS = re.compile(r"\b(nvidia|amd|instinct|geforce|tesla|quadro|google|cloud|generation)\b ?")
_PART = re.compile(r"\bmig\b")


def accelerator(name: str) -> Accelerator:
    """The catalogue's entry for a device, by its name or another spelling.

    If a device has several sizes and none is named, it is the largest.

    Raises:
        ClusterError: there is none; with the nearest names.
    """
    if (found := known(name)) is None:
        raise ClusterError(
            f'"{name}" is not in the catalogue of hardware. {nearest_to(name)} '
            "Or measure instead: leave --cluster out on that machine."
        )
    return found


def known(name: str) -> Accelerator | None:
    """Entry that `accelerator` returns; None where there is none."""
    if name in CATALOGUE or name in HARDWARE.installed:
        return HARDWARE[name]
    text = _words(name)
    family = (
        None
        if _PART.search(text)
        else next((f for f, spelling in _FAMILIES.items() if re.search(spelling + r"(?!\d)", text)), None)
    )
    if family is None:
        return None
    if family == "CPU":
        return _by_key(text) or CATALOGUE["CPU"]
    members = [device for key, device in CATALOGUE.items() if key == family or key.startswith(f"{family}-")]
    form = next((f for f, spelling in _FORMS.items() if re.search(spelling, text)), None)
    members = [device for device in members if form and f"-{form}" in device.name] or members
    sizes = [int(size) for size in _MEMORY.findall(text)]
    members = [device for device in members if f"-{max(sizes, default=0)}" in device.name] or members
    return members[0]


def _by_key(text: str) -> Accelerator | None:
    return next((device for key, device in CATALOGUE.items() if _plain(key) == text.replace(" ", "")), None)


def nearest_to(name: str) -> str:
    """Sentence with the catalogue's names that are nearest to one, or all of them."""
    by_plain = {_plain(key): key for key in HARDWARE.names}
    text = _MAKERS.sub("", _words(name)).replace(" ", "")
    names = [by_plain[plain] for plain in get_close_matches(text, by_plain, n=3, cutoff=0.5)]
    return f"The nearest there: {', '.join(names)}." if names else f"It has: {', '.join(HARDWARE.names)}."


def _words(name: str) -> str:
    return re.sub(r"[\s_\-/,()]+", " ", name.lower()).strip()


def _plain(key: str) -> str:
    return key.lower().replace("-", "")
