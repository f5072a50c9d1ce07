"""Preflight check of a plan: one process checks that ranks can divide model and batches.

For one rank of each pipeline stage, the check divides the model as in a run, and dry-runs a step (see `dry_run.py`). If
the model cannot be divided, the ranks do not start. If only the model's own code fails, the ranks start anyway, because
the code may work on tensors with values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import torch

from paceline.cluster.cluster import Cluster
from paceline.comm import Group
from paceline.engine.engine import RankEngine
from paceline.engine.guard import Settings
from paceline.engine.model_loss import SAMPLES
from paceline.errors import PacelineError, PlanError, PlanProblem, Problem
from paceline.job.batch import target_of
from paceline.job.job import Job
from paceline.job.parameters import names_of
from paceline.job.samples import DataSets, in_users_data
from paceline.job.streams import with_few
from paceline.own_random import kept_random
from paceline.planning.check.plan_context import Check, PlanContext, loss_is_tried
from paceline.planning.check.plan_errors import nearest_plan
from paceline.planning.model.model_info import model_info
from paceline.planning.plan import DEGREES, Plan
from paceline.run.build import loader_of
from paceline.run.dry_run.dry_run import StepFailed, dry_run_stage, for_dry_run, with_data_at_hand
from paceline.split.mesh import Mesh

BUDGET_S = 60.0  # maximum seconds for the search for another plan that works
LOOK_S = 20.0  # maximum seconds to find out which plans can divide a model, before the fastest is searched
_SMALL = 20_000_000  # largest number of parameters of a small model
_MOST_CANDIDATES = 12  # maximum number of other plans to try in the search for the nearest plan that works
_KEYS = ("sequence", "remat", *DEGREES[1:])  # plan keys that affect how a model is divided


def refused_of(job: Job, plans: Sequence[Plan], seconds: float) -> set[Plan]:
    """Return the plans that cannot divide the model, as found within `seconds`."""
    preflight, until = Preflight(job), time.monotonic() + seconds
    refused = set()
    for plan in plans:
        if time.monotonic() < until:
            with suppress(Exception):  # training reports errors of the job itself
                refused |= {plan} if preflight.reasons(plan) else set()
    return refused


class Preflight:
    """Checker of one job's model under several plans; each plan is checked once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._known: dict[Plan, list[Problem]] = {}
        self._runs_whole: bool | None = None

    @cached_property
    def _data(self) -> DataSets:
        data = self.job.data.build(input_shape=self.job.model.input_shape(), seed=self.job.seed)
        return with_few(data, self.job.global_batch)

    def refusal(self, plan: Plan, cluster: Cluster, world: int | None = None) -> PlanError | None:
        """Return the error if the plan cannot start; None if it can."""
        problems = self.reasons(plan) or reasons_of_loss(self.job, plan, self._data)
        if not problems:
            return None
        until = time.monotonic() + BUDGET_S

        def first(found: list[Problem]) -> PlanProblem | None:
            return PlanProblem("plan.cannot_divide", "{text}", text=found[0].text) if found else None

        def division(context: PlanContext) -> PlanProblem | None:
            if not context.plan.splits:
                return None
            if context.plan not in self._known and (len(self._known) > _MOST_CANDIDATES or time.monotonic() > until):
                return PlanProblem(
                    "plan.not_tried", "plan {plan} was not measured, because no time was left.", plan=context.plan
                )
            return first(self.reasons(context.plan))

        def loss(context: PlanContext) -> PlanProblem | None:
            return first(reasons_of_loss(self.job, context.plan, self._data))

        further = (Check(division, _KEYS), Check(loss, ("microbatches", *DEGREES)))
        nearest = nearest_plan(plan, self.job, cluster, world, further=further)
        return PlanError.of_problems(problems, nearest=nearest)

    def reasons_of_data(self) -> list[Problem]:
        """Return the reasons why the model cannot embed the data's tokens."""
        rows = max(model_info(self.job.model).vocabulary, default=None)
        if not self.job.data.is_tokenized or rows is None:
            return []
        own = in_users_data(self._data.train, [])[0]
        ids = max(source.form.vocab_size for source in getattr(own, "sources", [own]) if hasattr(source, "form"))
        if ids <= rows:
            return []
        return [
            Problem(
                "data.vocabulary_too_large",
                "the tokenizer has the ids 0 to {last}, but the model's embedding has only {rows} rows. Set the "
                "vocabulary of the model to at least {ids}, or use the tokenizer that belongs to the model.",
                last=ids - 1,
                ids=ids,
                rows=rows,
            )
        ]

    def reasons(self, plan: Plan) -> list[Problem]:
        """Return the reasons why ranks could not divide the model; empty if there are none."""
        if plan not in self._known:
            self._known[plan] = self._divided(plan) if plan.splits else []
        return self._known[plan]

    def _divided(self, plan: Plan) -> list[Problem]:
        job = with_data_at_hand(self.job)
        dry_plan = for_dry_run(job, plan, [])
        # without the cuts of the dry run: blocks of a small model are measured quickly
        as_it_is = replace(dry_plan, cut=plan.cut)
        if dry_plan.cut != plan.cut and sum(shape.numel for shape in model_info(job.model).parameters) > _SMALL:
            # only the dry run's cuts may be the cause, so check again without them
            return self._of_stages(job, dry_plan) and self._of_stages(job, as_it_is)
        return self._of_stages(job, as_it_is)

    def _of_stages(self, job: Job, plan: Plan) -> list[Problem]:
        until = time.monotonic() + BUDGET_S
        with kept_random():
            for stage in range(plan.pp):
                if stage and time.monotonic() > until:
                    break
                if found := self._of_stage(job, plan, stage):
                    return found
        return []

    def _of_stage(self, job: Job, plan: Plan, stage: int) -> list[Problem]:
        try:
            dry_run_stage(job, plan, self._data, stage)
        except StepFailed as error:
            failed = PlanProblem("plan.step_fails", "plan {plan}: {error}", plan=plan, error=str(error))
            return [failed] if self._whole_runs(job) else []
        except PlanError as error:
            return list(error.problems)
        except PacelineError:
            raise  # the job itself has an error
        except Exception:  # noqa: BLE001 - of tensors without values, where the model was divided already: the ranks will tell
            return []
        return []

    def _whole_runs(self, job: Job) -> bool:
        """Return True if the undivided model can dry-run a step.

        Otherwise a failure of the divided model does not show that the plan is at fault.
        """
        if self._runs_whole is None:
            try:
                self._runs_whole = dry_run_stage(job, Plan(), self._data, 0).stopped_by is None
            except Exception:  # noqa: BLE001 - whatever the user's model raises
                self._runs_whole = False
        return self._runs_whole


# maximum number of parameters; for larger models, the ranks check the loss before the first step
_TRIED_HERE = 50_000_000


def reasons_of_loss(job: Job, plan: Plan, data: DataSets) -> list[Problem]:
    """Return the reasons why the plan would train another loss; empty if none is found.

    The undivided model computes the loss in this process, with its initial weights. The result is also empty if only
    the ranks can check the loss.
    """
    if not loss_is_tried(job, plan) or sum(shape.numel for shape in model_info(job.model).parameters) > _TRIED_HERE:
        return []
    try:
        with kept_random():
            _try(job, plan, data)
    except PlanError as error:
        return list(error.problems)
    except Exception:  # noqa: BLE001 - whatever the user's model or loss raises: the ranks tell it with its place
        return []
    return []


def _try(job: Job, plan: Plan, data: DataSets) -> None:
    torch.manual_seed(job.seed)
    alone, group, model = Plan(precision=plan.precision), Group(), job.model.build()
    loader, settings = loader_of(job, Mesh.of(alone, group), data), Settings(precision=job.precision, seed=job.seed)
    engine = RankEngine(
        model,
        job.optimizer.build(dict(model.named_parameters()), names=names_of(model)),
        job.loss.build(),
        loader,
        alone,
        group,
        settings,
    )
    try:
        engine.plan = plan  # the loss is compared with its sum over this plan's parts
        engine.compute.normalization.prepare()
        batch = engine.compute.place(loader.example(SAMPLES))
        if not engine.compute.normalization.by_model:
            with torch.no_grad(), engine.compute.autocast():
                output = engine.compute.call(batch)
            engine.compute.normalization.hold(output, target_of(batch))
    finally:
        engine.close()
