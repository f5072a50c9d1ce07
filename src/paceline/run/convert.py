"""Export to, and import from, safetensors files and Hugging Face folders."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.errors import JobError, RunError
from paceline.files import short_name, write_whole
from paceline.job.model import DCP, architectures
from paceline.job.zoo.adapters import base_names, magnitudes
from paceline.job.zoo.quantized import RowFormat, plain_shapes
from paceline.planning.model.model_info import without_memory
from paceline.run.dcp import DcpPieces, open_dcp, save_dcp
from paceline.split.layout import Part, ShardLayout, WeightSource, local
from paceline.split.quantized import formats_of
from paceline.state.average import is_average
from paceline.state.manifest import TensorEntry, TensorPiece, sync_folder
from paceline.state.rank_state import parameter_and_key
from paceline.state.reader import NEWEST, Loaded, TensorPieces, chosen_checkpoint
from paceline.state.shard import described_bytes, write_one_by_one

if TYPE_CHECKING:
    from paceline.run.record.run import Run

HF_SHARD = "5GB"  # maximum size of one file; larger models are written as several files
_HF_FILE, _HF_INDEX = "model.safetensors", "model.safetensors.index.json"

# Export from a run


def export(run_or_folder: Path, out: Path, checkpoint: str = NEWEST, weights: str | None = None) -> None:
    """Write the model of a checkpoint as one safetensors file.

    Load the file with `model.load_state_dict(load_file(out))`. It has the model that the run evaluates, so
    floating-point buffers (batch-norm statistics) are averaged over the ranks. A tied tensor is written under each of
    its names. At most one tensor is in memory at a time. Damaged checkpoints are skipped with a warning.

    Args:
        run_or_folder: a run directory, its `checkpoints/`, or one checkpoint.
        out: the file to write.
        checkpoint: see `chosen_checkpoint`.
        weights: `raw` for the weights after the last update, or `ema` for their average; None exports the average if
            the run has one, else the raw weights.

    Raises:
        RunError: there is no checkpoint or no average, or `out` exists or cannot be written.
        CheckpointError: every checkpoint is damaged or incomplete.
    """
    if out.exists():
        raise RunError(
            "export.file_exists",
            "{file} exists already and is not overwritten. Remove it, or name another file.",
            file=out,
        )
    loaded = chosen_checkpoint(run_or_folder, checkpoint)
    _write(loaded, out, tied=True, weights=weights)


def export_hf(
    run: Path,
    out: Path,
    checkpoint: str = NEWEST,
    weights: str | None = None,
    *,
    merged: dict[str, Tensor] | None = None,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder.

    Load the folder with transformers' `AutoModel….from_pretrained(out)`. It has the files of `save_pretrained`:
    `config.json`, and `model.safetensors` or, above 5 GB, several files with an index. Tensors have the names of the
    architecture's published checkpoints; a tied tensor is written once. The tokenizer and the generation settings are
    copied from the model's folder, and `README.md` is a model card. The disk needs space for two copies of the weights.
    The weights are not loaded into memory.

    Args:
        run: a run directory, its `checkpoints/`, or one checkpoint in it.
        out: the folder to create.
        checkpoint: see `chosen_checkpoint`.
        weights: see `export`.
        merged: tensors of the model to write; None for those of the checkpoint.

    Raises:
        RunError: there is no run or checkpoint, the model is not a transformers model, or `out` exists or cannot be
            written.
        CheckpointError: every checkpoint is damaged or incomplete.
    """
    from paceline.run.model_folder import CARD, copy_settings, model_card

    _must_be_new(out)
    record, model = _hf_model(run)
    loaded = chosen_checkpoint(run, checkpoint)
    with new_folder_as(out) as folder:
        state = merged or _mapped(loaded, folder, tied=False, weights=weights)
        # for tied tensors, transformers chooses which name to write
        for alias, name in loaded.aliases.items() if merged is None else ():
            state[_bare(alias)] = state[_bare(name)]
        _quiet()
        model.to(next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32))
        model.save_pretrained(folder / "model", state_dict=state, max_shard_size=HF_SHARD)
        del state
        copy_settings(record.job, folder / "model")
        kept = weights or ("ema" if any(map(is_average, loaded.shared)) else "raw")
        described = "moving average" if kept == "ema" else "after the last update"
        write_whole(folder / "model" / CARD, model_card(record, loaded.step, described))


def export_dcp(run_or_folder: Path, out: Path, checkpoint: str = NEWEST, weights: str | None = None) -> None:
    """Write the model of a checkpoint as a checkpoint of `torch.distributed.checkpoint`.

    Load it with `torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id=out)`, on any number of ranks and
    with any sharding. Tensors have the names of the model's state dict; a tied tensor is written under each of its
    names. The disk needs space for two copies of the weights. The weights are not loaded into memory.

    Args:
        run_or_folder: a run directory, its `checkpoints/`, or one checkpoint.
        out: the folder to create.
        checkpoint: see `chosen_checkpoint`.
        weights: see `export`.

    Raises:
        RunError: there is no checkpoint, or `out` exists or cannot be written.
        CheckpointError: every checkpoint is damaged or incomplete.
    """
    _must_be_new(out)
    loaded = chosen_checkpoint(run_or_folder, checkpoint)
    with new_folder_as(out) as folder:
        save_dcp(_mapped(loaded, folder, tied=True, weights=weights), folder / "model")


def _must_be_new(folder: Path) -> None:
    if folder.exists():
        raise RunError(
            "export.folder_exists",
            "{folder} exists already and is not overwritten. Remove it, or name another folder.",
            folder=folder,
        )


@contextmanager
def new_folder_as(out: Path) -> Iterator[Path]:
    """Create a temporary folder, whose subfolder `model` becomes `out` at the end."""
    try:
        with new_folder_beside(out) as folder:
            (folder / "model").mkdir(mode=0o700)
            yield folder
            (folder / "model").rename(out)
            sync_folder(out.parent)
    except OSError as error:
        text = f"{out} cannot be written: {error.strerror or error}"
        raise RunError(
            "export.folder_unusable",
            "{reason}. Name a folder that can be created, on a disk with enough space for two copies of the weights.",
            reason=text,
        ) from error


def _mapped(loaded: Loaded, folder: Path, *, tied: bool, weights: str | None) -> dict[str, Tensor]:
    """Write the model's tensors into a file, and return them mapped into memory."""
    whole = folder / "all-weights"
    _write(loaded, whole, tied=tied, weights=weights)
    with safe_open(whole, framework="pt") as file:  # maps the file, so the tensors take no memory
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping


@contextmanager
def new_folder_beside(out: Path) -> Iterator[Path]:
    """Create a temporary private folder beside `out`, on the same disk."""
    prefix = f".{short_name(out, 100)}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=out.parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def exported_entries(loaded: Loaded, *, tied: bool = False, weights: str | None = None) -> dict[str, TensorEntry]:
    """Return the entries of the model's state dict.

    With `tied`, a tied tensor has an entry for each of its names.
    """
    everything = {**loaded.shared.entries, **loaded.own_entries(loaded.coordinate)}
    averages = {name: entry for name, entry in everything.items() if is_average(name)}
    if weights == "ema" and not averages:
        raise RunError(
            "export.no_average",
            "The run keeps no average of its weights. Set ema: 0.999 in its job, or export raw weights.",
        )
    if weights != "raw":
        everything |= {f"model/{parameter_and_key(name)[0]}": entry for name, entry in averages.items()}
    if tied:
        everything |= {alias: everything[name] for alias, name in loaded.aliases.items() if name in everything}
    return {_bare(name): entry for name, entry in everything.items() if name.startswith(("model/", "buffer/"))}


def _bare(name: str) -> str:
    return name.partition("/")[2]


def _write(loaded: Loaded, out: Path, *, tied: bool, weights: str | None) -> None:
    tensors = TensorPieces(exported_entries(loaded, tied=tied, weights=weights), loaded.shared.files)
    averaged = {_bare(name): buffer for name, buffer in loaded.averaged_buffers().items()}
    if tied:
        averaged |= {
            _bare(alias): averaged[_bare(name)] for alias, name in loaded.aliases.items() if _bare(name) in averaged
        }
    described = {name: {"dtype": entry.dtype, "shape": entry.shape} for name, entry in tensors.entries.items()}
    # the frozen weights may be in other files than the checkpoint
    formats = {name: format for name, format in _formats(loaded.path).items() if name in described}
    described |= {n: {"dtype": "F32", "shape": [described[n]["shape"][0], f.columns]} for n, f in formats.items()}

    def take(name: str) -> Tensor:
        found = averaged[name] if name in averaged else tensors[name]
        return formats[name].unpack(found, torch.float32) if name in formats else found

    write_weights(out, described, take)


def _formats(checkpoint: Path) -> dict[str, RowFormat]:
    """Return the formats of a run's quantized weights, whose bytes are in its checkpoints."""
    from paceline.run.record.run import Run

    path = checkpoint.absolute().parents[1]
    if not (path / "job.yaml").exists() or (job := Run(path).job).quantize is None:
        return {}
    return formats_of(without_memory(job.model))


def write_weights(out: Path, described: Mapping[str, dict[str, Any]], take: Callable[[str], Tensor]) -> None:
    """Write tensors one by one into a temporary file, then rename the file.

    Args:
        described: dtype and shape of each tensor, in the form of the file's header.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        with new_folder_beside(out) as folder:
            write_one_by_one(folder / "weights", described, take)
            os.replace(folder / "weights", out)
            sync_folder(out.parent)
    except OSError as error:
        size = sum(map(described_bytes, described.values()))
        raise RunError(
            "export.unwritable",
            "{file} cannot be written ({size:,} bytes): {reason}. Name a file in a writable folder on a disk with "
            "enough room.",
            file=out,
            size=size,
            reason=error.strerror or error,
        ) from error


def run_of(run: Path) -> Run:
    """Return the run to which a run directory, its `checkpoints/` or a checkpoint belongs.

    Raises:
        RunError: there is no job beside the checkpoint.
    """
    from paceline.run.record.run import Run

    path = next((path for path in (run, *run.absolute().parents[:2]) if (path / "job.yaml").exists()), None)
    if path is None:
        raise RunError(
            "export.no_job",
            "{folder} is not in a run directory, so the job.yaml that describes the model is missing. Name a run "
            "directory.",
            folder=run,
        )
    return Run(path)


def _hf_model(run: Path) -> tuple[Run, Any]:
    record = run_of(run)
    with torch.device("meta"):
        model = record.job.model.adapting(None).quantizing(None).build()  # an export has ordinary weights
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise RunError(
            "export.not_hugging_face",
            "the model of {path} ({class_name}) is not a Transformers model, so it has no Hugging Face layout. "
            "Export one safetensors file instead: paceline export RUN model.safetensors",
            path=record.path,
            class_name=type(model).__name__,
        )
    return record, model


# Import into a run


def weights_from(path: Path | str) -> TensorPieces:
    """Open a safetensors file or a Hugging Face folder, to read its tensors on access.

    The tensors keep their names from the files. `dcp:FOLDER` names a checkpoint of `torch.distributed.checkpoint`.

    Raises:
        JobError: there are no weights at `path`, or the files cannot be read.
    """
    if str(path).startswith(DCP):
        return open_dcp(Path(str(path).removeprefix(DCP)))
    path = Path(path)
    files = _weight_files(path)
    entries: dict[str, TensorEntry] = {}
    for number, file in enumerate(files):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is not a mapping
                    stored = opened.get_slice(name)
                    shape = stored.get_shape()
                    piece = TensorPiece(shard=number, key=name, offset=[0] * len(shape), shape=shape)
                    entries[name] = TensorEntry(dtype=stored.get_dtype(), shape=shape, pieces=[piece])
        except (OSError, SafetensorError) as error:
            raise JobError(
                "model.weights_unreadable", "the weights in {file} cannot be read: {error}", file=file, error=error
            ) from error
    return TensorPieces(entries, files)


def fitted(source: TensorPieces, model: nn.Module) -> WeightSource:
    """Map the tensors of `source` to the parameter and buffer names of `model`.

    The result covers the model's whole state dict, except for adapters, and for a head that the folder's architecture
    lacks. For example, a `BertForSequenceClassification` can start from weights of `BertForMaskedLM`; its classifier
    keeps its random values. The model may be on the meta device, but must not be divided yet.
    The source may have a tied tensor under any of its names. In a transformers model, names may have or lack the
    prefix of the base model. A parameter may be a stack of the published tensors of experts, as in Mixtral. If a model
    fuses published tensors in other ways, transformers reads the weights, and each rank temporarily needs memory for
    the whole model.

    Raises:
        JobError: the weights belong to another model. The message lists missing tensors, unknown tensors and
            different shapes.
    """
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()} | plain_shapes(model)
    # the names in files are those without adapters
    names = base_names(model)
    own = {base: name for name, base in names.items() if base is not None}
    wanted = {base: shapes[name] for base, name in own.items()}
    if isinstance(source, DcpPieces):
        source = source.of_model(wanted)
    entries, unknown = _renamed(source, model, wanted)
    of_head = _heads(source, model)
    missing = [name for name in wanted if name not in entries and not of_head(name)]
    unknown = [name for name in unknown if not of_head(name)]
    found: WeightSource
    if missing and unknown and hasattr(model, "from_pretrained") and (source.files[0].parent / "config.json").exists():
        read = _read_by_transformers(source, model)
        found = _WeightsInMemory({own[name]: tensor for name, tensor in read.items() if name in own})
    else:
        other = [(name, entry.shape, wanted[name]) for name, entry in entries.items() if entry.shape != wanted[name]]
        _refuse(source, missing, unknown, other)
        renamed = source.with_entries({own[name]: entry for name, entry in entries.items()})
        state, quantized = model.state_dict(), {*plain_shapes(model), *formats_of(model)}
        renamed.held_as = {
            own[name]: tensor.dtype
            for name in entries
            if (tensor := state[own[name]]).is_floating_point() and own[name] not in quantized
        }
        found = renamed
    lengths = {name: own[weight] for name, weight in magnitudes(names)}
    return _WithMagnitudes(found, lengths, shapes) if lengths else found


def initialised(source: WeightSource, model: nn.Module) -> list[str]:
    """Return a sentence about tensors that a `fitted` source lacks, if any, other than adapters."""
    known = set(source)
    lacking = [name for name, base in base_names(model).items() if base is not None and name not in known]
    if not lacking:
        return []
    more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
    return [f"missing from the initial weights, and initialised randomly: {', '.join(lacking[:5])}{more}"]


def load_weights(named: Mapping[str, Tensor], parts: Mapping[str, Part] | None, source: WeightSource) -> None:
    """Load this rank's part of the model from a `fitted` source.

    Args:
        named: parameters and buffers, by their names in the undivided model; tensors or DTensors. Those that the source
            does not have, such as adapters, stay as they are.
        parts: the part of each tensor that this rank holds; a tensor without an entry is whole.
    """
    known = set(source)
    for name, tensor in ((name, tensor) for name, tensor in named.items() if name in known):
        own = local(tensor).detach()
        source.fill(name, own, parts[name].layout if parts is not None and name in parts else None)


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / _HF_FILE).is_file():
        return [path / _HF_FILE]
    try:
        index = json.loads((path / _HF_INDEX).read_bytes())
        return [path / name for name in sorted(set(index["weight_map"].values()))]
    except FileNotFoundError:
        what = f"holds neither {_HF_FILE} nor {_HF_INDEX}" if path.is_dir() else "does not exist"
        raise JobError(
            "model.weights_not_found",
            "{path} {what}. Name a safetensors file, or a folder in Hugging Face's layout with safetensors weights.",
            path=path,
            what=what,
        ) from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise JobError(
            "model.weights_index_invalid",
            "{path} is not a valid index of weight files: {error}",
            path=path / _HF_INDEX,
            error=error,
        ) from error


def _renamed(
    source: TensorPieces, model: nn.Module, wanted: Mapping[str, object]
) -> tuple[dict[str, TensorEntry], list[str]]:
    """Return entries by the model's names, and the names that the model lacks.

    A tied tensor has an entry for each of its names.
    """
    prefix = f"{getattr(model, 'base_model_prefix', None) or ''}."
    entries: dict[str, TensorEntry] = {}
    unknown: list[str] = []
    published, fusions = _transformers_names(model)

    def wanted_as(*spellings: str) -> str | None:
        return next(
            (n for own in spellings for n in (own, prefix + own, own.removeprefix(prefix)) if n in wanted), None
        )

    fused: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name, entry in source.entries.items():
        if (found := wanted_as(name, published(name))) is not None:
            entries[found] = entry
            continue
        unknown.append(name)
        target, pattern, fusion = fusions(name)
        if fusion is not None and (found := wanted_as(target)) is not None and not isinstance(source, DcpPieces):
            fused.setdefault(found, (fusion, {}))[1].setdefault(pattern, []).append(name)
    taken: set[str] = set()
    for found, (fusion, names_of_pattern) in fused.items():
        of_patterns = [sorted(names_of_pattern.get(p, []), key=_by_numbers) for p in fusion.source_patterns]
        if (whole := _stacked([[source.entries[name] for name in names] for names in of_patterns])) is not None:
            entries[found] = whole
            taken.update(*of_patterns)
    unknown = [name for name in unknown if name not in taken]
    of_base = base_names(model)
    for names in ([of_base.get(name) or name for name in tied] for tied in _tied(model)):
        there = next((entries[name] for name in names if name in entries), None)
        if there is not None:
            entries |= {name: entries.get(name, there) for name in names if name in wanted}
    return entries, unknown


def _stacked(parts: Sequence[Sequence[TensorEntry]]) -> TensorEntry | None:
    """Return the stack (experts, rows, …) of the tensors of all experts.

    An expert's parts are one below the other. The result is None if the parts do not fit together.

    Args:
        parts: for each part, the tensors (rows, …) of all experts.
    """
    first = parts[0][0] if parts[0] else None
    if first is None or any(len(part) != len(parts[0]) for part in parts):
        return None
    pieces, row = [], 0
    for part in parts:
        for number, entry in enumerate(part):
            if entry.dtype != first.dtype or entry.shape != part[0].shape or entry.shape[1:] != first.shape[1:]:
                return None
            pieces += [
                TensorPiece(
                    shard=piece.shard,
                    key=piece.key,
                    offset=[number, row + piece.offset[0], *piece.offset[1:]],
                    shape=[1, *piece.shape],
                )
                for piece in entry.pieces
            ]
        row += part[0].shape[0]
    return TensorEntry(dtype=first.dtype, shape=[len(parts[0]), row, *first.shape[1:]], pieces=pieces)


def _by_numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _transformers_names(model: Any) -> tuple[Callable[[str], str], Callable[[str], tuple[str, str, Any]]]:
    """Return two functions of a published name.

    The first returns the model's name. The second returns the model's name of the parameter that the tensor is a part
    of, the pattern of the part, and transformers' description; the description is None if there is no such parameter,
    or if it is not made by stacking the tensors of experts.
    """
    if not hasattr(model, "from_pretrained"):
        return str, lambda name: (name, "", None)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # transformers 4 renames in other ways; `_read_by_transformers` helps out
        return str, lambda name: (name, "", None)
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]

    def fusion(name: str) -> tuple[str, str, Any]:
        target, pattern = rename_source_key(name, renamings, converters)
        found = next((one for one in converters if pattern in one.source_patterns), None)
        return target, pattern or "", found if found is not None and _stacks(found) else None

    return lambda name: str(rename_source_key(name, renamings, [])[0]), fusion


def _stacks(converter: Any) -> bool:
    """Return True if a conversion stacks experts like `_stacked`."""
    operations = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    stack, join = ("MergeModulelist", 0), ("Concatenate", 1)
    several = len(converter.source_patterns) > 1
    return len(converter.target_patterns) == 1 and operations == ([stack, join] if several else [stack])


# buffers of old versions of transformers, which hold no learned values
_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"attn\.masked_bias$")


def _heads(source: TensorPieces, model: Any) -> Callable[[str], bool]:
    """Return a function that recognises tensors that may be missing or unknown.

    These are the tensors of heads and poolers, if the folder of the weights states another architecture than the
    model's, and buffers that transformers ignores.
    """
    ignored = [*_OLD_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    own = {base for base in base_names(model).values() if base is not None}
    prefix = getattr(model, "base_model_prefix", "") or ""
    base = getattr(model, prefix, None) if prefix else None
    stated = architectures(source.where / "config.json") if source.where.is_dir() else []
    if len(source.files) == 1:
        stated = architectures(source.files[0].parent / "config.json")
    other = base is not None and bool(stated) and type(model).__name__ not in stated
    is_base = not any(name.startswith(f"{prefix}.") for name in source)

    def of_head(name: str) -> bool:
        if name not in own:
            if any(re.search(pattern, name) for pattern in ignored):
                return True
            name = f"{prefix}.{name}" if is_base else name
        return other and (not name.startswith(f"{prefix}.") or name.startswith(f"{prefix}.pooler."))

    return of_head


def _tied(model: nn.Module) -> Iterator[list[str]]:
    for named in (model.named_parameters, model.named_buffers):
        names: dict[Tensor, list[str]] = {}
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
        yield from (several for several in names.values() if len(several) > 1)


class _WeightsInMemory:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def fill(self, name: str, own: Tensor, layout: ShardLayout | None = None) -> None:
        with torch.no_grad():
            own.copy_(self.tensors[name] if layout is None else layout.take(self.tensors[name]))


def _read_by_transformers(source: TensorPieces, model: Any) -> dict[str, Tensor]:
    _quiet()
    read = type(model).from_pretrained
    whole, info = read(
        source.files[0].parent,
        config=model.config,
        dtype=next(model.parameters()).dtype,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    of_head = _heads(source, model)
    missing, unknown = (
        [key for key in sorted(info[kind]) if not of_head(key)] for kind in ("missing_keys", "unexpected_keys")
    )
    _refuse(source, missing, unknown, sorted(info["mismatched_keys"]))
    lacking = {key for key in info["missing_keys"] if of_head(key)}
    return {name: tensor for name, tensor in whole.state_dict().items() if name not in lacking}


class _WithMagnitudes:
    """Source with DoRA's initial magnitudes, which are the norms of the weights' rows.

    Args:
        weights: name of the weight of each magnitude.
        shapes: shapes of the weights.
    """

    def __init__(self, source: WeightSource, weights: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> None:
        self._source, self._weights, self._shapes = source, weights, shapes

    def __iter__(self) -> Iterator[str]:
        yield from self._source
        yield from self._weights

    def fill(self, name: str, own: Tensor, layout: ShardLayout | None = None) -> None:
        if name not in self._weights:
            self._source.fill(name, own, layout)
            return
        shape = self._shapes[self._weights[name]]
        # in one type under every plan, because plans hold the weights in different types
        weight = torch.empty(*shape, dtype=torch.float32)
        self._source.fill(self._weights[name], weight)
        lengths = weight.norm(dim=1)
        with torch.no_grad():
            own.copy_(lengths if layout is None else layout.take(lengths))


def _refuse(
    source: TensorPieces,
    missing: Sequence[str],
    unknown: Sequence[str],
    other: Sequence[tuple[str, Sequence[int], Sequence[int]]],
) -> None:
    """Raise an error if the weights do not fit the model.

    Args:
        other: name, source shape and model shape of each tensor whose shapes differ.
    """
    wrong = [f"{name} is missing" for name in missing] + [f"{name} is unknown to the model" for name in unknown]
    wrong += [f"{name} has shape {tuple(there)}, the model wants {tuple(here)}" for name, there, here in other]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise JobError(
            "model.weights_differ",
            "the weights in {path} belong to another model: {wrong}{more}",
            path=source.where,
            wrong="; ".join(wrong[:5]),
            more=more,
        )


def _quiet() -> None:
    import transformers

    transformers.logging.disable_progress_bar()
