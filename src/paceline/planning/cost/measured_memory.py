"""Memory of a plan on a calibrated machine, from the peaks that were measured there."""

from __future__ import annotations

from paceline.planning.calibrate import Calibration, CalibrationPoint, interpolated
from paceline.planning.cost.layout import Layout
from paceline.planning.cost.measured_links import here

# fraction of activations that every rank of tp keeps whole: norms, residuals, inputs of matrices
_UNDIVIDED = 0.6
# largest fraction of the baseline that an engine takes besides tensors
_MOST_BESIDE = 0.3


def measured_memory(layout: Layout, held: dict[str, float]) -> dict[str, float]:
    """The bytes of `held`, adjusted to sum to the calibration's prediction.

    They are unchanged without a calibration. A process holds more than tensors: `runtime` gets the difference, and if
    that is negative, all are reduced in proportion.
    """
    found = layout.machines.calibration
    if found is None or not found.timings or not found.baseline_bytes:
        return held
    peak = peak_bytes(layout, found)
    others = {name: size for name, size in held.items() if name != "runtime"}
    runtime = max(peak - sum(others.values()), 0.5 * found.baseline_bytes)
    scale = (peak - runtime) / max(sum(others.values()), 1.0)
    return {name: size * scale for name, size in others.items()} | {"runtime": runtime}


def peak_bytes(layout: Layout, found: Calibration) -> float:
    """Bytes of the rank that holds the most."""
    return found.baseline_bytes + _beside(layout, found) + _state_bytes(layout, found) + _pass_bytes(layout, found)


def _beside(layout: Layout, found: Calibration) -> float:
    """Bytes of an engine besides tensors, from the process's first calibration point.

    Later points were measured with memory left over from earlier ones.
    """
    axis = "none" if layout.ranks == 1 else "dp"
    points = [point for point in found.points_of(axis, found.precisions[0]) if point.precision == found.precisions[0]]
    if not points:
        return 0.0
    beside = [point.peak_bytes - found.baseline_bytes - _known_bytes(layout, found, point) for point in points]
    return min(max(sum(beside) / len(beside), 0.0), _MOST_BESIDE * found.baseline_bytes)


def _known_bytes(layout: Layout, found: Calibration, point: CalibrationPoint) -> float:
    degrees = {} if point.axis == "none" else {point.axis: point.ranks}
    own = Layout(
        trace=layout.trace,
        machines=here(found),
        samples=float(point.samples),
        microbatches=point.microbatches,
        precision=point.precision,  # type: ignore[arg-type]
        parameter_bytes=layout.parameter_bytes,
        gradient_bytes=layout.gradient_bytes,
        optimizer_bytes=layout.optimizer_bytes,
        **degrees,  # type: ignore[arg-type]
    )
    return _state_bytes(own, found) + _pass_bytes(own, found)


def _state_bytes(layout: Layout, found: Calibration) -> float:
    """Bytes of parameters and optimizer state; gradients come with the pass.

    FSDP2 has one unit of the model gathered besides.
    """
    return found.parameters * (layout.parameter_bytes + layout.optimizer_bytes) / (layout.fsdp * layout.tp * layout.pp)


def _pass_bytes(layout: Layout, found: Calibration) -> float:
    """Bytes of gradients and of activations in flight on the first stage."""
    precision = found.nearest_precision(layout.precision)
    plain = found.timings_of(layout.ranks, precision)
    whole = interpolated(
        [timing.samples for timing in plain], [float(timing.peak_bytes) for timing in plain], layout.samples
    )
    again = found.timings_of(layout.ranks, precision, layout.remat) if layout.remat != "none" else []
    known = {timing.samples: timing.peak_bytes for timing in plain}
    less = [
        (timing.samples, float(known[timing.samples] - timing.peak_bytes))
        for timing in again
        if timing.samples in known
    ]
    if less:
        whole -= max(0.0, interpolated([samples for samples, _ in less], [size for _, size in less], layout.samples))
    gradients = min(found.parameters * layout.gradient_bytes, whole)
    begun = 1.0
    if layout.pp > 1:
        begun = (layout.microbatches if layout.schedule == "gpipe" else min(layout.microbatches, layout.pp)) / layout.pp
    kept = (whole - gradients) * begun * (_UNDIVIDED + (1 - _UNDIVIDED) / layout.tp) / layout.cp
    return gradients / (layout.tp * layout.pp) + kept
