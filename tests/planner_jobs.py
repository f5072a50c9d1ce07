"""Jobs that tests of the planner change one key of: a small GPT on sequences, and an image model on digits."""

from __future__ import annotations

from typing import Any

from paceline.job.job import Job


def job_on_tokens(**changes: Any) -> Job:
    """The zoo's GPT on sequences of 24 tokens, in batches of 16."""
    tokens = {"kind": "synthetic", "vocab": 256, "shape": [24]}
    common = {"model": "gpt", "data": tokens, "loss": "cross_entropy", "optimizer": "adamw", "global_batch": 16}
    return Job(**(common | {"stop": {"steps": 1}} | changes))


def job_on_digits(**changes: Any) -> Job:
    """The zoo's convolutional model on digits, in batches of 8."""
    common = {"model": "cifar_cnn", "data": "digits", "loss": "cross_entropy", "optimizer": "sgd", "global_batch": 8}
    return Job(**(common | {"stop": {"steps": 1}} | changes))
