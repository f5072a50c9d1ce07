"""How the cost model's fitted constants were found, so that anyone can find them again.

    python benchmarks/published_fit.py [--cold] [--tables DIR]

Links and attention come from timings of NCCL's all-reduce (`tables/calib_collectives.csv`) and of single operations on
an H100 (`tables/operations_h100.csv`); what they gave stands in `paceline/planning/cost/constants.py`. All others are
fitted to a tenth of the rows of each table of runs, which are not scored. They start from what data sheets and
documentation say, and move from there only as far as the rows outweigh that: a fit with a prior, so that none ends at a
bound. A table weighs as its rows to the power of 0.6.

Writes `paceline/planning/cost/constants.py`. With `--cold`, fits once more without each table in turn, and writes
`tables/fits.json`, with which `published.py` predicts that table cold.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product, repeat
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from paceline.planning.cost import compute, constants, stages
from paceline.planning.cost import compute as attention
from paceline.planning.cost import compute as products
from paceline.planning.cost import constants as fitted
from paceline.planning.cost import layout as traffic
from paceline.planning.cost.estimate import predict_layout
from paceline.planning.cost.frameworks import FRAMEWORKS
from paceline.planning.cost.layout import Layout
from paceline.planning.tables.layouts import Row, read
from published_rows import TABLES, set_aside

FITS = TABLES / "fits.json"
FITTED = Path(fitted.__file__)


@dataclass(frozen=True)
class Free:
    """A number that is fitted: `CONSTANT`, `framework:field` or `device:sustained`.

    Attributes:
        assumed: what is assumed in advance.
        width: standard deviation of its logarithm around that.
    """

    name: str
    assumed: float
    width: float


GLOBAL = (
    Free("GEMM_START_K", 100.0, 0.4),
    Free("UNALIGNED", 0.254, 0.2),
    Free("VECTOR_TOP", 0.85, 0.05),
    Free("VECTOR_BACKWARD", 1.7, 0.15),
    Free("SCORES_BACKWARD", 1.2, 0.2),
    Free("KERNEL_S", 2.43e-06, 0.12),
    Free("LAUNCH_TP", 0.0359, 0.4),
    Free("MEETING", 6.0, 0.3),
    Free("WAVE", 0.5, 0.3),
    Free("STEP_S", 0.001, 0.7),
    Free("OPTIMIZER_PASSES", 0.9, 0.2),
    Free("PIPELINE_S", 0.0003, 0.7),
    Free("LINK_TOP_BETWEEN", 0.80, 0.15),
    Free("CONTENTION", 0.126, 0.3),
    Free("EXPERT_S", 5e-5, 0.5),
    Free("SCAN", 0.25, 0.3),
    Free("CONVOLUTION", 0.9, 0.2),
    Free("CONVOLUTION_VECTOR", 0.7, 0.3),
    Free("CONVOLUTION_3D", 1.5, 0.2),
    Free("CONVOLUTION_TF32", 1.4, 0.2),
    Free("MIXTURE_KERNELS", 60.0, 0.7),
    Free("EXPERT_KERNELS", 3.0, 0.5),
)
# kernels are counted, so least is free in them
OF_FRAMEWORK = {"derating": 0.08, "vector": 0.25, "kernels": 0.12, "loss": 0.3, "overlaps_ep": 0.5}
# what was assumed of software of one origin is wrong alike: factors that its frameworks have in common
OF_FAMILY = {"derating": 0.07, "vector": 0.3}
FAMILIES = {
    "of Megatron": ("Megatron-DeepSpeed", "Megatron-LM", "Megatron Core", "Megatron Core of NeMo 26.06", "HAI-LLM"),
    "of torch": ("DeepSpeed", "FSDP", "Composer FSDP", "torchtitan", "torchtitan, compiled", "DDP", "DDP of images"),
    "of TensorFlow": (
        "TensorFlow with Horovod",
        "TensorFlow of 2019 with Horovod",
        "TensorFlow with Horovod of images",
        "TensorFlow with XLA of images",
    ),
}
# of one framework alone
ONLY = {"Megatron Core of NeMo 26.06": {"mixtures": 0.4}}
SUSTAINED = 0.10
ROUNDS, ROUNDS_NEAR = 12, 4
WEIGHT = 0.2  # a table of so many times the rows has so many times to this power less weight for each, squared
CLIP = 0.05  # errors of logarithms beyond this weigh less and less


def main() -> None:
    """Fit all, print, and with --cold once without each table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--cold", action="store_true", help="fit without each table in turn, and write fits.json")
    options = parser.parse_args()
    rows, _ = read(sorted(options.tables.glob("*.csv")))
    aside = set_aside(rows)
    kept = [row for row in rows if row.place in aside and row.seconds]
    found = fit(kept)
    for name, value in found.items():
        print(f"{name} = {value:.4g}")
    FITTED.write_text(as_module(composed(found)), encoding="utf-8")
    print(f"written: {FITTED}")
    if options.cold:
        tables = sorted({row.table for row in kept})
        without = [[row for row in kept if row.table != table] for table in tables]
        with ProcessPoolExecutor() as pool:
            each = pool.map(fit, without, repeat(found), repeat(ROUNDS_NEAR))
            fits = dict(zip(tables, map(composed, each), strict=True))
        FITS.write_text(json.dumps(fits, indent=0) + "\n", encoding="utf-8")
        print(f"written: {FITS}")


def free_of(rows: Sequence[Row]) -> list[Free]:
    """Numbers that the rows say something about."""
    used = {row.layout.framework.name for row in rows}
    devices = {
        row.layout.machines.device.name: row.layout.machines.device.sustained * constants.PRODUCTS_TOP for row in rows
    }
    profiles = {framework.name: framework.profile for framework in FRAMEWORKS if framework.name in used}
    own = [
        Free(f"{name}:{field}", float(getattr(profile, field)), width)
        for name, profile in profiles.items()
        for field, width in (OF_FRAMEWORK | ONLY.get(name, {})).items()
        if getattr(profile, field)
    ]
    common = [
        Free(f"{family}:{field}", 1.0, width)
        for family, names in FAMILIES.items()
        if used & {*names}
        for field, width in OF_FAMILY.items()
    ]
    return [*GLOBAL, *common, *own, *(Free(f"{name}:sustained", value, SUSTAINED) for name, value in devices.items())]


def composed(found: Mapping[str, float]) -> dict[str, float]:
    """What was found, with the factors of families in the values of all their frameworks."""
    values = {name: value for name, value in found.items() if name.rpartition(":")[0] not in FAMILIES}
    profiles = {framework.name: framework.profile for framework in FRAMEWORKS}
    for family, names in FAMILIES.items():
        for name, field in product(names, OF_FAMILY):
            if (common := found.get(f"{family}:{field}")) is not None:
                values[f"{name}:{field}"] = common * values.get(f"{name}:{field}", getattr(profiles[name], field))
    return values


def fit(rows: Sequence[Row], start: Mapping[str, float] | None = None, rounds: int = ROUNDS) -> dict[str, float]:
    """The values with the least errors of logarithms and deviations from what was assumed; see `composed`.

    Args:
        start: values near to those that are sought.
    """
    free = free_of(rows)
    assumed = np.array([each.assumed for each in free])
    widths = np.array([each.width for each in free])
    counts = Counter(row.table for row in rows)
    weights = np.array([counts[row.table] ** -WEIGHT for row in rows])

    def residuals(moved: np.ndarray) -> np.ndarray:
        values = dict(zip((each.name for each in free), assumed * np.exp(moved * widths), strict=True))
        told = predicted(rows, composed(values))
        errors = np.array([math.log(seconds / (row.seconds or 1)) for row, seconds in told])
        return np.concatenate([_robust(errors) * weights / CLIP, moved])

    begin = np.log([(start or {}).get(each.name, each.assumed) / each.assumed for each in free]) / widths
    moved = least_squares(residuals, begin, diff_step=1e-2, max_nfev=rounds).x
    return {each.name: float(value) for each, value in zip(free, assumed * np.exp(moved * widths), strict=True)}


def _robust(errors: np.ndarray) -> np.ndarray:
    """Errors of which large ones count with their square root (Huber's, as residuals)."""
    scaled = errors / CLIP
    soft = np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
    return np.asarray(np.sign(scaled) * soft * CLIP)


def predicted(rows: Sequence[Row], values: Mapping[str, float]) -> list[tuple[Row, float]]:
    """Step time of each row with some values."""
    with_constants(values)
    return [(row, predict_layout(changed(row.layout, values)).step_time_s) for row in rows]


def changed(layout: Layout, values: Mapping[str, float]) -> Layout:
    """A layout with the values of its framework and device."""
    own = {
        field: values[f"{layout.framework.name}:{field}"]
        for field in (*OF_FRAMEWORK, "mixtures")
        if f"{layout.framework.name}:{field}" in values
    }
    device = layout.machines.device
    sustained = values.get(f"{device.name}:sustained")
    if sustained is not None:
        fitted.SUSTAINED[device.name] = sustained
    return replace(layout, framework=replace(layout.framework, **own)) if own else layout  # type: ignore[arg-type]


def cold_seconds(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Step times of rows, by values that no row of their table was used for; leaves what is fitted as it was.

    A table without values of its own was not fitted to.
    """
    fits = json.loads(FITS.read_text(encoding="utf-8")) if FITS.is_file() else {}
    assumed = composed({each.name: each.assumed for each in free_of(rows)})
    shipped = assumed | {key: value for key, value in in_use().items() if key in assumed}
    seconds: dict[tuple[str, int], float] = {}
    for table in dict.fromkeys(row.table for row in rows):
        own = [row for row in rows if row.table == table]
        values = assumed | fits[table] if table in fits else shipped
        seconds |= {row.place: found for row, found in predicted(own, values)}
    predicted([], shipped)
    for device in {row.layout.machines.device.name for row in rows} - set(_FITTED_DEVICES):
        fitted.SUSTAINED.pop(device, None)
    fitted.SUSTAINED.update(_FITTED_DEVICES)
    return seconds


_FITTED_DEVICES = dict(fitted.SUSTAINED)


def in_use() -> dict[str, float]:
    """The values that are in use, named as `fit` names them."""
    frameworks = {f"{name}:{field}": value for name, own in fitted.FRAMEWORKS.items() for field, value in own.items()}
    devices = {f"{name}:sustained": value for name, value in fitted.SUSTAINED.items()}
    return fitted.CONSTANTS | frameworks | devices


def as_module(values: Mapping[str, float]) -> str:
    """The values as the module that the cost model reads."""
    frameworks: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        owner, _, field = name.rpartition(":")
        if owner:
            frameworks.setdefault(owner, {})[field] = value
    devices = {owner: own.pop("sustained") for owner, own in frameworks.items() if "sustained" in own}
    lines = [_HEAD, "CONSTANTS: dict[str, float] = {"]
    lines += [f'    "{name}": {value:.4g},' for name, value in values.items() if name.isupper()]
    lines += ["}", "", _OF_FRAMEWORKS, "FRAMEWORKS: dict[str, dict[str, float]] = {"]
    for name, own in frameworks.items():
        if own:
            lines += _entry(name, [f'"{key}": {value:.4g}' for key, value in own.items()])
    lines += ["}", "", _OF_DEVICES, "SUSTAINED: dict[str, float] = {"]
    lines += [f'    "{name}": {value:.4g},' for name, value in devices.items()]
    return "\n".join([*lines, "}", ""])


def _entry(name: str, values: Sequence[str]) -> list[str]:
    """Lines of a table in a table, as the formatter breaks them."""
    line = f'    "{name}": {{' + ", ".join(values) + "},"
    return [line] if len(line) <= 120 else [f'    "{name}": {{', *(f"        {value}," for value in values), "    },"]


_HEAD = '''"""Values that `benchmarks/published_fit.py` found and wrote: change them there.

They rest on a tenth of the rows of each table of published runs, which are not scored, and on what data sheets and
documentation say in advance.
"""

from __future__ import annotations
'''
_OF_FRAMEWORKS = "# of each framework: of its computing, of its traffic beside products, of its kernels, of its loss"
_OF_DEVICES = "# of the peak of each device, what long products keep within its power"


def with_constants(values: Mapping[str, float]) -> None:
    """Set constants, and forget what was computed with others."""
    for name, value in values.items():
        if name.isupper():
            setattr(constants, name, value)
    for module in (attention, compute, products, stages, traffic):
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


if __name__ == "__main__":
    main()
