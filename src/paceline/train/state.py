"""Everything that a run needs to go on exactly where it was: weights, optimizer, random states, and its place in the data."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.train.checkpoint import Snapshot
from paceline.train.checkpoint_read import Loaded

if TYPE_CHECKING:
    from paceline.train.engine import Engine


def snapshot(engine: Engine, values: dict[str, Any]) -> Snapshot:
    """The engine's state as named tensors and JSON values; `values` are the loop's own, added under "loop"."""
    model, optimizer = engine.model, engine.optimizer
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    shared: dict[str, Tensor] = {f"model/{name}": p.detach() for p, name in names.items()}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(parameter)
        if name is None:
            continue
        for key, value in state.items():
            if isinstance(value, Tensor):
                shared[f"optimizer/{name}/{key}"] = value
            else:
                scalars.setdefault(name, {})[key] = value
    return Snapshot(
        shared=shared,
        own={**{f"buffer/{name}": buffer.detach() for name, buffer in _persistent_buffers(model)}, **_random_tensors()},
        values={
            "step": engine.step_count,
            "loader": engine.loader.state_dict(),
            "items_per_sample": engine.items_per_sample,
            "optimizer": {"groups": _groups(optimizer, names), "scalars": scalars},
            "rule": engine.rule.state_dict(),
            "replicas": engine.group.size,
            "loop": values,
        },
        own_values={"python": _python_state(), "numpy": _numpy_state()},
        aliases=_aliases(model),
    )


def restore(engine: Engine, loaded: Loaded) -> dict[str, Any]:
    """Put a loaded checkpoint into the engine; returns the loop's values.

    Random states return only on the number of replicas that saved them; on another, every rank draws from a fresh seed of its own.

    Raises:
        CheckpointError: it is of another model or optimizer. Names what differs.
    """
    model, optimizer = engine.model, engine.optimizer
    tensors = loaded.shared | loaded.own
    targets: dict[str, Tensor] = {f"model/{n}": p for n, p in model.named_parameters()}
    targets |= {f"buffer/{n}": b for n, b in _persistent_buffers(model)}
    _check_same_model(targets, tensors, loaded)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    _restore_optimizer(model, optimizer, loaded)
    values = loaded.values
    engine.step_count = values["step"]
    engine.items_per_sample = values["items_per_sample"]
    engine.loader.load_state_dict(values["loader"])
    engine.rule.load_state_dict(values["rule"])
    if values["replicas"] == engine.group.size:
        _restore_random(loaded, engine.group.rank)
    else:
        torch.manual_seed(engine.settings.seed * 1_000_003 + 1 + engine.group.rank + 7919 * engine.step_count)
    loop: dict[str, Any] = values["loop"]
    return loop


def _persistent_buffers(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    kept = model.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """The further names of tied parameters and shared buffers, each with the name under which the tensor is saved."""
    further: dict[str, str] = {}
    for kind, named in (("model", model.named_parameters), ("buffer", model.named_buffers)):
        first: dict[Tensor, str] = {}
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(tensor, name) != name:
                further[f"{kind}/{name}"] = f"{kind}/{first[tensor]}"
    return further


def _groups(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> list[dict[str, Any]]:
    """The optimizer's hyper-parameters, its parameters by name."""
    return [
        {**{k: v for k, v in g.items() if k != "params"}, "params": [names.get(p, "") for p in g["params"]]} for g in optimizer.param_groups
    ]


def _restore_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loaded: Loaded) -> None:
    """Through torch's own `load_state_dict`, which places each value where the optimizer wants it."""
    saved = loaded.values["optimizer"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    state_dict = optimizer.state_dict()
    flat = [names.get(p, "") for g in optimizer.param_groups for p in g["params"]]
    index = {name: i for i, name in enumerate(flat)}
    state: dict[int, dict[str, Any]] = {}
    for full, tensor in loaded.shared.items():
        if full.startswith("optimizer/"):
            name, _, key = full.removeprefix("optimizer/").rpartition("/")
            if name not in index:
                raise CheckpointError(
                    f"the checkpoint of step {loaded.step} has optimizer state for {name!r}, which this optimizer does not hold"
                )
            state.setdefault(index[name], {})[key] = tensor
    for name, scalars in saved["scalars"].items():
        state.setdefault(index[name], {}).update(scalars)
    if len(saved["groups"]) != len(state_dict["param_groups"]):
        raise CheckpointError(
            f"the checkpoint of step {loaded.step} has {len(saved['groups'])} groups of parameters in its optimizer, "
            f"this optimizer {len(state_dict['param_groups'])}"
        )
    for group, old in zip(state_dict["param_groups"], saved["groups"], strict=True):
        for key, value in old.items():
            if key not in ("params", "fused", "foreach"):  # how the step is computed belongs to the plan of today
                group[key] = tuple(value) if isinstance(value, list) else value
    optimizer.load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})


def _check_same_model(targets: dict[str, Tensor], tensors: dict[str, Tensor], loaded: Loaded) -> None:
    saved = {n: t for n, t in tensors.items() if n.startswith(("model/", "buffer/"))}
    wrong = [f"{n.split('/', 1)[1]} is missing" for n in targets if n not in saved]
    wrong += [f"{n.split('/', 1)[1]} is unknown to the model" for n in saved if n not in targets]
    wrong += [
        f"{n.split('/', 1)[1]} has shape {tuple(saved[n].shape)}, the model wants {tuple(t.shape)}"
        for n, t in targets.items()
        if n in saved and saved[n].shape != t.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"the checkpoint of step {loaded.step} is of another model: {'; '.join(wrong[:5])}{more}")


def _random_tensors() -> dict[str, Tensor]:
    tensors = {"rng/torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    return tensors


def _python_state() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]


def _numpy_state() -> list[Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [kind, np.asarray(keys).tolist(), *rest]


def _restore_random(loaded: Loaded, rank: int) -> None:
    torch.set_rng_state(loaded.own["rng/torch"].cpu())
    if torch.cuda.is_available() and "rng/cuda" in loaded.own:
        torch.cuda.set_rng_state(loaded.own["rng/cuda"].cpu())
    own = loaded.own_values[rank]
    version, numbers, gauss = own["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = own["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
