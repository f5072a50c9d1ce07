"""Export of runs that train adapters: the adapters alone, or folded into the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import nn

from paceline.errors import RunError
from paceline.job.model import ModelSpec
from paceline.job.zoo.adapters import base_names, lora_layers, merge, peft_config
from paceline.planning.model.model_info import without_memory
from paceline.run.convert import export_hf, exported_entries, new_folder_as, run_of, write_weights
from paceline.run.saved_model import whole_model
from paceline.state.reader import NEWEST, TensorPieces, chosen_checkpoint
from paceline.state.shard import CODES

Kind = Literal["adapter", "merge"]

_TASKS = {
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
}
_PREFIX = "base_model.model."  # of all names in a peft file


def check_kind(run: Path, kind: Kind | None, *, dcp: bool) -> None:
    """Verify that the options of an export fit a run with or without adapters.

    Raises:
        RunError: the options do not fit the run.
    """
    record = next((path for path in (run, *run.absolute().parents[:2]) if (path / "job.yaml").exists()), None)
    adapter = run_of(run).job.adapter if kind is not None or record is not None else None
    if kind is not None and adapter is None:
        raise RunError(
            "export.no_adapter",
            "{run} trains the model without adapters. Export it without --{option}.",
            run=run,
            option=kind,
        )
    if adapter is not None and (kind is None or dcp):
        raise RunError(
            "export.adapter_or_merge",
            "{run} trains adapters, and its checkpoints have no other weights. Pass --adapter to write the adapters as "
            "a peft folder, or --merge to write the whole model with merged adapters (--layout file or hf).",
            run=run,
        )


def export_adapter(run: Path, out: Path, checkpoint: str = NEWEST, weights: str | None = None) -> None:
    """Write the adapters of a checkpoint as a folder of peft.

    Load the folder with `PeftModel.from_pretrained(base, out)`. It has `adapter_config.json` and
    `adapter_model.safetensors`. Modules that the job trains as a whole are in it, too, and so are the base model's
    buffers, such as batch-norm statistics, which training changes.

    Args:
        run: a run directory, its `checkpoints/`, or one checkpoint in it.
        out: the folder to create.
        checkpoint: see `chosen_checkpoint`.
        weights: see `export`.

    Raises:
        RunError: there is no checkpoint, only a part of a module is trained, or `out` exists or cannot be written.
        CheckpointError: every checkpoint is damaged or incomplete.
    """
    spec = run_of(run).job.model
    model = without_memory(spec)
    loaded = chosen_checkpoint(run, checkpoint)
    entries = exported_entries(loaded, weights=weights)
    names = base_names(model)
    whole = {name for name in entries if names.get(name) is not None and name in dict(model.named_parameters())}
    own = {
        _PREFIX + (name.replace(".default", "") if names.get(name, name) is None else name): entry
        for name, entry in entries.items()
    }
    config = _configured(spec, model, _modules_of(model, whole))
    tensors = TensorPieces(own, loaded.shared.files)
    described = {name: {"dtype": entry.dtype, "shape": entry.shape} for name, entry in own.items()}
    with new_folder_as(out) as folder:
        config.save_pretrained(folder / "model")
        write_weights(folder / "model" / "adapter_model.safetensors", described, tensors.__getitem__)


def export_merged(
    run: Path, out: Path, checkpoint: str = NEWEST, weights: str | None = None, *, hf: bool = False
) -> None:
    """Write the model of a checkpoint, with its adapters folded into their base layers.

    The whole model is in memory.

    Args:
        run: a run directory, its `checkpoints/`, or one checkpoint in it.
        out: the file to write, or the folder to create.
        checkpoint: see `chosen_checkpoint`.
        weights: see `export`.
        hf: True to write a folder in Hugging Face's layout instead of one safetensors file.

    Raises:
        RunError: there is no checkpoint, or `out` exists or cannot be written.
        CheckpointError: every checkpoint is damaged or incomplete, or the base weights have changed.
    """
    if out.exists():
        raise RunError(
            "export.file_exists",
            "{file} exists already and is not overwritten. Remove it, or name another file.",
            file=out,
        )
    model = whole_model(run_of(run), checkpoint, weights).cpu()
    merge(model)
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if hf:
        export_hf(run, out, checkpoint, weights, merged=state)
        return
    described = {name: {"dtype": CODES[t.dtype], "shape": list(t.shape)} for name, t in state.items()}
    write_weights(out, described, state.__getitem__)


def _configured(spec: ModelSpec, model: nn.Module, modules: list[str]) -> Any:
    assert spec.adapter is not None, "the run has an adapter"
    config = peft_config(model, spec.adapter.lora, [name for name, _ in lora_layers(model)])
    config.base_model_name_or_path = None if spec.folder is None else str(spec.folder)
    config.task_type = _TASKS.get(spec.task or "")
    config.inference_mode = True
    config.modules_to_save = modules or None
    return config


def _modules_of(model: nn.Module, names: set[str]) -> list[str]:
    """Return the modules that consist of parameters.

    Raises:
        RunError: a module has other parameters, too.
    """
    modules = sorted({name.rpartition(".")[0] for name in names})
    for module in modules:
        others = {f"{module}.{name}" for name, _ in model.get_submodule(module).named_parameters()} - names
        if not module or others:
            raise RunError(
                "export.module_in_part",
                "a peft folder holds whole modules, but the job trains only a part of {module}. Use --merge.",
                module=module or "the model itself",
            )
    return modules
