"""Terms that server and clients share: the job, and the layout of secure sums."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from paceline.errors import FederateError, JobError
from paceline.job.job import Job
from paceline.run.record.run import FREE_KEYS, differences
from paceline_federated.client import federated
from paceline_federated.layout import Layout
from paceline_federated.rule import FederatedRule, Local
from paceline_federated.rule_info import FEDERATED_RULES
from paceline_federated.secure.packing import Packing

_OWN_KEYS = FREE_KEYS | {"data"}  # of each end alone


def job_values(job: Job) -> dict[str, Any]:
    """A job as plain values, for clients."""
    values: dict[str, Any] = job.model_dump(mode="json", exclude_defaults=True)
    return values


def digest_of(job: Job) -> str:
    """A digest of the part of a job that server and clients share."""
    return hashlib.sha256(json.dumps(_shared(job), sort_keys=True).encode()).hexdigest()


def check_job(values: Any, own: Job | None) -> Job:
    """The job that a server has sent, as this client takes it.

    Args:
        own: this client's copy, which must be the same in all that is shared; its data and its code count.

    Raises:
        FederateError: it would run code or read files that it names, and there is no copy; or the copy differs.
    """
    if not isinstance(values, dict) or len(json.dumps(values, default=str)) > 2**20:
        raise FederateError("the server sent what is no job")
    try:
        job = Job.model_validate(values)
        federated(job)
    except JobError as error:
        raise FederateError(f"the server's job: {error}. Give this client its own copy of it: --job FILE") from error
    if own is None:
        _must_run_our_code_alone(job)
        return job
    if differing := list(differences(_shared(job), _shared(own))):
        raise FederateError(f"the server has another job than this client: {'; '.join(differing)}")
    return own


def packing_of(job: Job, layout: Layout, rule: FederatedRule) -> Packing | None:
    """The layout of the job's secure sums; None where it has none."""
    spec = federated(job)
    if spec.secure is None:
        return None
    weighs = spec.weigh == "samples" and spec.privacy is None
    clip = spec.privacy.clip if spec.privacy is not None else spec.secure.clip
    most_samples = spec.secure.most_samples if weighs else None
    return Packing(layout.numel, returned_by(rule, layout), clip, most_samples, spec.secure.group)


def returned_by(rule: FederatedRule, layout: Layout) -> dict[str, int]:
    """Length of each tensor that a rule's clients return beside their update, by name."""
    zeros = torch.zeros(layout.parameters, dtype=layout.dtype)
    state = {name: zeros.clone() for name in rule.client_keeps}
    sent = {name: zeros.clone() for name in rule.sends()} | {name: zeros.clone() for name in rule.client_keeps}
    returned = rule.finish(zeros, torch.ones((), dtype=layout.dtype), Local(zeros, sent, 1.0, state))
    return {name: tensor.numel() for name, tensor in returned.items()}


def _shared(job: Job) -> dict[str, Any]:
    return {key: value for key, value in job.model_dump(mode="json").items() if key not in _OWN_KEYS}


def _must_run_our_code_alone(job: Job) -> None:
    """Refuse what somebody else's job could make this client run or read."""
    own_rule = federated(job).rule.partition(":")[0].partition(",")[0] in FEDERATED_RULES.built_in
    named = [
        *(str(path) for path in (job.model.factory, job.model.hf, job.model.weights) if path is not None),
        *(
            str(path)
            for key in ("factory", "held_out_factory", "collate", "collate_held_out")
            if (path := getattr(job.data, key, None))
        ),
        *(name for name in (job.loss.name, *(metric.name for metric in job.metrics)) if ":" in name),
        *(() if own_rule else (federated(job).rule,)),
    ]
    if named:
        raise FederateError(
            f"the server's job names code or files to load here: {', '.join(named)}. Give this client its own copy of "
            "the job, with code that you trust: --job FILE"
        )
