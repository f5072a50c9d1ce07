"""Definitions of the figures on a plan's page, all of which are predicted."""

from __future__ import annotations

from paceline.planner.explain.explain import PART_NAMES
from paceline.report.definitions import DEFINITIONS, Definition, Used

_TERMS = {
    "predicted_step": Definition(
        "step time", "Of one optimizer step, all ranks together, as the cost model predicts it; not measured."
    ),
    "predicted_throughput": Definition("throughput", "Samples per second = global batch / predicted step time."),
    "predicted_tokens": Definition("token throughput", "Tokens per second = throughput × tokens per sample."),
    "mfu": Definition(
        "MFU",
        "Model FLOPs utilisation (Chowdhery et al., 2022, arXiv:2204.02311): FLOPs of the model, without those "
        "computed again, over what "
        "all devices could do at their peak in the time of a step.",
    ),
    "device_memory": Definition("memory", "The most that the fullest rank holds at once on its device, as predicted."),
    "cost": Definition("cost", "Price of a device for an hour, as you gave it, × devices × time."),
    "device_seconds": Definition(
        "device-seconds", "Devices × predicted step time: what a step costs, in units of the price of a device."
    ),
    "gap": Definition(
        "optimality gap",
        "By what part of its time the best plan may miss the optimum of the whole space, as this model predicts it.",
    ),
    "pareto": Definition(
        "not beaten in both", "No other plan that was found is better in time as well as in the other figure."
    ),
    "predicted_scaling": Definition(
        "strong scaling",
        (
            "The same job, global batch included, on more devices of the same kind, each number of them with "
            "its best plan."
        ),
    ),
    "predicted_speedup": Definition(
        "speedup", "Step time on the fewest devices on which the job fits / step time on these."
    ),
    "predicted_efficiency": Definition(
        "efficiency",
        (
            "Speedup / how many times the devices are. More than 100 % where more devices have the memory not to "
            "compute again."
        ),
    ),
    "gain": Definition(
        "gain", "Throughput of the best plan with the change over that without, less 1, by the same model."
    ),
    **{
        f"part_{part}": Definition(PART_NAMES[part], text)
        for part, text in {
            "compute": "Forward and backward pass: products of matrices and other kernels.",
            "recompute": "What the backward pass computes again instead of keeping it (remat).",
            "launch": "Kernels that wait for the host to start them.",
            "tp": "Sums and gathers between the ranks that shard a layer’s matrices.",
            "cp": "Keys and values between the ranks that shard a sequence.",
            "ep": "Tokens on their way to experts and back.",
            "fsdp": "Gathering weights and scattering gradients, as far as computing does not hide it.",
            "pp": "Activations on their way from stage to stage, as far as they hold up the next one.",
            "bubble": "Stages of the pipeline that wait for their neighbours.",
            "dp": "Gradients between the replicas, as far as the backward pass does not hide it.",
            "optimizer": "The update of the parameters.",
            "other": "What every step takes beside.",
        }.items()
    },
}


class Terms(Used):
    """The page's own definitions beside those of all pages."""

    def __call__(self, name: str) -> Definition:
        if name not in self.names:
            self.names.append(name)
        return _TERMS.get(name) or DEFINITIONS[name]
