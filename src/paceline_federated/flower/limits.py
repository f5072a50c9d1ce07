"""Check that a deployment on Flower can train a job.

Importing this module needs neither torch nor Flower.
"""

from __future__ import annotations

from paceline.errors import JobError
from paceline.job.job import Job

FEWEST = 3  # smallest number of clients of a secure sum; with two clients, each would learn the other's update


def must_fit_flower(job: Job) -> int:
    """Return the number of rounds of a job that Flower can deploy.

    Raises:
        JobError: the job has settings that a deployment does not support. The message says what to change.
    """
    from paceline_federated.client import federated, rule_of
    from paceline_federated.rules import FederatedRule

    spec, rule = federated(job), rule_of(job)
    if spec.compress != "none" or spec.compress_down != "none":
        raise JobError(
            "federate.flower_compress",
            "federate.compress and compress_down: Flower's strategies do not support compressed numbers. Leave "
            "them out.",
        )
    if rule.buffer is not None:
        raise JobError(
            "federate.flower_no_rounds",
            "federate.rule {rule} has no rounds, but Flower's strategies need them. Use another rule.",
            rule=spec.rule,
        )
    if job.stop.steps is None or len(job.stop.model_dump(exclude_defaults=True)) > 1:
        raise JobError(
            "federate.flower_stop",
            "stop: a Flower app runs a fixed number of rounds and has no other stop rule. Set only stop.steps.",
        )
    plain_mean = spec.rule == "fedavg" or spec.rule.startswith("fedprox")
    if spec.privacy is not None and not plain_mean:
        raise JobError(
            "federate.flower_privacy",
            "federate.privacy: Flower adds its noise to the new weights. That equals noise on the mean update only "
            "with the rules fedavg and fedprox, but the rule is {rule}. Use fedavg or fedprox without other "
            "arguments.",
            rule=spec.rule,
        )
    returns = type(rule).finish is not FederatedRule.finish
    if spec.secure is not None and returns and spec.weigh == "samples":
        raise JobError(
            "federate.secure_weights",
            "federate.secure: SecAgg+ uses one weight for all numbers of a client, but rule {rule} also needs an "
            "unweighted mean. Set federate.weigh: equal.",
            rule=spec.rule,
        )
    if spec.secure is not None and (spec.per_round or spec.clients) < FEWEST:
        raise JobError(
            "federate.secure_too_few",
            "federate.secure: a sum hides individual updates only with at least {fewest} clients in a round",
            fewest=FEWEST,
        )
    return job.stop.steps
