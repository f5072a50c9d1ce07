"""Construction of a run's model, data loader and engine from its job and plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from paceline.comm import Group
from paceline.data.loader import Loader
from paceline.data.parts import PartsFlow, PartsReader
from paceline.device import DEVICE_VARIABLE, has_pinned_memory, is_accelerator
from paceline.engine.engine import RankEngine
from paceline.engine.guard import Settings
from paceline.errors import ClusterError, DataError
from paceline.job.job import Job
from paceline.job.parameters import names_of
from paceline.job.partition import Partition
from paceline.job.samples import DataSets, all_files_of, files_of
from paceline.job.streams import Stream
from paceline.planning.plan import DATA_AXES, Plan
from paceline.planning.sync_info import sync_info
from paceline.run.convert import fitted, initialised, load_weights, weights_from
from paceline.split.layout import Part, ShardLayout, WeightSource, predicted_bytes
from paceline.split.mesh import Mesh
from paceline.split.quantized import QuantizingSource, formats_held, quantized_whole, refuse_cut_moments
from paceline.split.whole_updates import muon_matrices, share_updates

if TYPE_CHECKING:
    from paceline.run.record.run import Run
    from paceline.split.deferred_init import DeferredModel

_RETRY_S = 120.0  # longest time for which reading a batch is retried if a store cannot be reached


def check_device(run: Run, group: Group) -> None:
    """Refuse a group whose device type differs from the cluster's."""
    if run.cluster.kind != group.device.type:
        raise ClusterError(
            "device.torch_without",
            "{cluster}, but this torch ({version}) trains on {type}. Install a build of torch for the "
            "accelerators, or set {variable}=cpu to train on the CPU.",
            cluster=run.cluster.describe(),
            version=torch.__version__,
            type=group.device.type,
            variable=DEVICE_VARIABLE,
        )


def built(job: Job, plan: Plan) -> nn.Module | DeferredModel:
    """Build the job's model with the job's seed.

    If the plan divides the model, the model is built on the meta device. A quantized model is built tensor by tensor,
    so that its weights are never all in memory before they are quantized.
    """
    seed_all(job.seed)
    if not plan.splits and job.quantize is None:
        return job.model.build()
    from paceline.split.deferred_init import record

    recorded = record(job.model.build)
    return recorded if plan.splits else quantized_whole(recorded)


def begin_engine(
    job: Job, plan: Plan, data: DataSets, group: Group, build: Callable[[], nn.Module | DeferredModel] | None = None
) -> RankEngine:
    """Build the model and this rank's engine for a job that begins.

    The model is built after the loader processes have been forked, so they do not share its memory.

    Args:
        build: function that builds the model; None selects `built`.
    """
    mesh = Mesh.of(plan, group)
    loader = loader_of(job, mesh, data, plan.num_workers)
    try:
        loader.start()
        return _engine(job, plan, build() if build is not None else built(job, plan), mesh, loader)
    except BaseException:
        loader.close()
        raise


def build_engine(
    job: Job,
    plan: Plan,
    model: nn.Module | DeferredModel,
    data: DataSets,
    group: Group,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    goes_on: bool = False,
    inseparable: Mapping[str, str] | None = None,
) -> RankEngine:
    """Build this rank's engine for a job, from an existing model.

    Args:
        optimizer: optimizer of a whole model that an earlier generation of the run trained; None makes a new one.
        goes_on: whether the model continues from an earlier generation; if not, it begins with the job's weights.
        inseparable: `Split.inseparable` if this process has already divided the model.

    Raises:
        PlanError: the plan cannot divide this model, or its number of ranks differs from the group's.
    """
    mesh = Mesh.of(plan, group)
    loader = loader_of(job, mesh, data, plan.num_workers)
    return _engine(job, plan, model, mesh, loader, optimizer, goes_on=goes_on, inseparable=inseparable)


def _engine(
    job: Job,
    plan: Plan,
    model: nn.Module | DeferredModel,
    mesh: Mesh,
    loader: Loader,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    goes_on: bool = False,
    inseparable: Mapping[str, str] | None = None,
) -> RankEngine:
    loss = job.loss.build()
    settings = settings_of(job)
    # the state of an earlier generation has only adapters; a model that this process already trained has the base, too
    begins = not goes_on or (job.adapter is not None and optimizer is None)
    source = published(job, model) if begins else None
    undivided = model if isinstance(model, nn.Module) else model.model
    about = [] if source is None else initialised(source, undivided)
    names = names_of(undivided)
    equal = not sync_info(plan.sync).local_steps  # replicas take the same steps
    fused = plan.fuses(job, accelerators=is_accelerator(mesh.world.device))
    if plan.splits:
        from paceline.engine.split_model import divide

        loaded = list(source or ()) if begins else [name for several in names.values() for name in several]
        split = divide(model, plan, mesh, loader, loss, settings, loaded=loaded, inseparable=inseparable)
        if source is not None:
            quantizing = QuantizingSource(source, split.quantized)
            load_weights({**split.parameters, **split.named_buffers()}, split.parts, quantizing)
        refuse_cut_moments(job.optimizer, split.parts, split.parameters, plan)
        optimizer = job.optimizer.build(split.parameters, names=names, fused=fused)
        share_updates(optimizer, mesh, split.parameters, split.parts, identical_replicas=equal)
        engine = RankEngine(split.model, optimizer, loss, loader, plan, mesh.world, settings, split, identical=goes_on)
        engine.about_weights = about
        return engine
    assert isinstance(model, nn.Module), "only a plan that divides a model takes one without memory"
    if source is not None:
        _load_whole(model, source)
    whole = dict(model.named_parameters())
    optimizer = optimizer or job.optimizer.build(whole, names=names, fused=fused)
    share_updates(optimizer, mesh, whole, None, identical_replicas=equal)
    engine = RankEngine(model, optimizer, loss, loader, plan, mesh.world, settings, identical=goes_on)
    engine.about_weights = about
    return engine


def settings_of(job: Job) -> Settings:
    """Return the engine's settings from the job."""
    by_loss = job.stop.loss_below is not None or job.stop.plateau is not None
    return Settings(
        job.clip_norm,
        job.nonfinite,
        job.batch_norm,
        job.precision,
        job.seed,
        job.buffers,
        compare_every=job.compare_every,
        run_ahead=not by_loss,
        spike=job.spike,
        clip_value=job.clip_value,
        ema=job.ema,
        keeps_base=job.adapter is not None,
    )


def load_published(job: Job, model: nn.Module) -> None:
    """Load the pretrained weights that the job names, if any, into a whole model."""
    source = published(job, model)
    if source is not None:
        _load_whole(model, source)


def _load_whole(model: nn.Module, source: WeightSource) -> None:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    load_weights(named, None, QuantizingSource(source, formats_held(model)))


def published(job: Job, model: nn.Module | DeferredModel) -> WeightSource | None:
    """Return the job's initial weights, fitted to the model; None if they are random."""
    weights = job.model.weights_path()
    if weights is None:
        return None
    return fitted(weights_from(weights), model if isinstance(model, nn.Module) else model.model)


def loader_of(job: Job, mesh: Mesh, data: DataSets, num_workers: int = 0) -> Loader:
    """Return the loader of this data-parallel rank's share of the training set.

    `num_workers` is the number of loader processes; 0 uses the job's number.
    """
    if isinstance(data.train, Stream):
        return _stream_loader(job, mesh, data.train, num_workers or job.data.num_workers)
    hosts = mesh.data_rank_hosts
    host_samples = _host_samples(job, data, mesh.world)
    shards = files_of(data.train)
    if shards is not None and host_samples is None:
        sets = all_files_of(data.train, data.held_out, data.test)
        _check_same_shards([number for files in sets for number in files.digest], mesh.world)
    partition = Partition(
        job.partition,
        samples=len(data.train) if host_samples is None else sum(host_samples),  # type: ignore[arg-type]
        global_batch=job.global_batch,
        seed=job.seed,
        replica=mesh.data_rank,
        replicas=mesh.data_ranks,
        hosts=hosts,
        host_samples=host_samples,
        labels=getattr(data.train, "labels", None),
        drop_last=job.drop_last,
        shards=shards,
    )
    workers = num_workers or job.data.num_workers
    return Loader(
        data.train,
        partition,
        num_workers=workers,
        pin_memory=has_pinned_memory(mesh.world.device),
        # shorter than the deadline, because the other ranks end the run after the deadline
        retry_s=min(_RETRY_S, job.deadline_s / 2),
    )


def _check_same_shards(digest: list[int], group: Group) -> None:
    """Verify that all hosts of a run have the same files.

    Raises:
        DataError: the files of a host differ from the files of host 0.
    """
    digests = group.gather_json(digest)
    for host, found in zip(group.hosts, digests, strict=True):
        if found != digests[0]:
            raise DataError(
                "data.files_differ",
                "the data files on host {host} differ from the files on host 0: other sizes, contents or "
                "numbers of rows. Copy the same files to every host, or read them from a URL.",
                host=host,
            )


def _stream_loader(job: Job, mesh: Mesh, stream: Stream, num_workers: int) -> Loader:
    ranks = mesh.data_ranks
    # more processes than parts would have nothing to read
    workers = num_workers if stream.parts is None else min(num_workers, max(1, stream.parts // ranks))
    reader = PartsReader(stream, mesh.data_rank, ranks, job.seed, batch_size=job.global_batch, workers=max(1, workers))
    flow = PartsFlow(
        reader, data_group=mesh.group(*DATA_AXES), world=mesh.world, drop_last=job.drop_last, workers=workers
    )
    pinned = has_pinned_memory(mesh.world.device)
    return Loader(stream, flow, num_workers=workers, pin_memory=pinned, samples=reader, rank=mesh.world.rank)


def predicted_state_bytes(job: Job, engine: RankEngine) -> int:
    """Predict the bytes of this rank's parameters, gradients and optimizer state.

    The run's record also has the measured bytes, for comparison.
    """
    held = engine.named_parameters()
    parts = engine.parts or {name: Part(name, ShardLayout.whole(p.shape)) for name, p in held.items()}
    return predicted_bytes(parts, held, job.optimizer, muon_matrices(engine.optimizer), copies=job.weight_copies).total


def seed_all(seed: int) -> None:
    """Seed all random number generators that models and data sets use."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # `torch.manual_seed` would also record a stack trace for every kind of accelerator
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _host_samples(job: Job, data: DataSets, group: Group) -> list[int] | None:
    """Return each host's number of samples if hosts have their own files; else None."""
    if not job.partition.host_files:
        return None
    lengths = group.gather_json(len(data.train))  # type: ignore[arg-type]
    of_host: dict[int, set[int]] = {}
    for host, length in zip(group.hosts, lengths, strict=True):
        of_host.setdefault(host, set()).add(length)
    for host, found in of_host.items():
        if len(found) > 1:
            raise DataError(
                "data.hosts_differ",
                "the ranks of host {host} have training sets of different lengths: {found}",
                host=host,
                found=sorted(found),
            )
    return [of_host[host].pop() for host in sorted(of_host)]
