"""Kubernetes: pods of an indexed Job, a JobSet or a TrainJob, one per host."""

from __future__ import annotations

import os
import re
import socket

from paceline.cluster.launch_engines.engine import HostPlace, LaunchEngine
from paceline.cluster.launch_engines.variables import COORDINATOR, HOST_NUMBER, HOSTS, place_from
from paceline.errors import LaunchError

_INDEX = "JOB_COMPLETION_INDEX"
_TRAIN_JOB = ("PET_NODE_RANK", "PET_NNODES")
_ADVICE_TRAIN_JOB = "A TrainJob's numNodes is one number; PET_NNODES=1:4 (elastic) is torchrun's."
_ADVICE_JOB = f"In the manifest, completionMode is Indexed, and {HOSTS} is the number of completions."


class Kubernetes(LaunchEngine):
    """Pod of a job whose pods find one another by name.

    An indexed Job says no number of pods: without PACELINE_HOSTS its pods are runs of their own, as in a sweep. With
    PACELINE_HOST_NUMBER the manifest says the pod's number, as it has to where the hosts are several jobs of a JobSet.
    """

    def detect(self) -> bool:
        return _TRAIN_JOB[1] in os.environ or (
            _INDEX in os.environ and HOSTS in os.environ and HOST_NUMBER not in os.environ
        )

    def hosts(self) -> HostPlace | None:
        if _TRAIN_JOB[1] in os.environ:
            names, advice, coordinator = _TRAIN_JOB, _ADVICE_TRAIN_JOB, os.environ.get("PET_MASTER_ADDR", "")
            if coordinator and (port := os.environ.get("PET_MASTER_PORT")):
                coordinator = f"{coordinator}:{port}"
        else:
            names, advice, coordinator = (_INDEX, HOSTS), _ADVICE_JOB, _first_pod()
        return place_from(*names, "kubernetes", advice, coordinator=coordinator, run_name=_job_name())


def _first_pod() -> str:
    """Name of the pod with index 0; empty if unknown.

    Raises:
        LaunchError: the pod is of a second replica of a JobSet's job, where the indices begin at 0 again.
    """
    job_set, replicated = os.environ.get("JOBSET_NAME"), os.environ.get("REPLICATED_JOB_NAME")
    if job_set and replicated:
        of_replica = re.match(rf"{re.escape(f'{job_set}-{replicated}')}-(\d+)-\d+$", socket.gethostname())
        if of_replica and int(of_replica[1]):
            raise LaunchError(
                f"this pod is of job {of_replica[1]} of {replicated} in the JobSet {job_set}, and the pods of each job "
                f"count from 0 ({_INDEX}): two would be host 0. Give {replicated} replicas: 1 and the number of hosts "
                f"as completions. Or let every job have one pod: {HOST_NUMBER} from the annotation "
                f"jobset.sigs.k8s.io/job-global-index, and {COORDINATOR} the name of the first."
            )
        return f"{job_set}-{replicated}-0-0.{job_set}"
    host, index = socket.gethostname(), os.environ.get(_INDEX, "")
    if not host.endswith(f"-{index}"):
        return ""
    domain = socket.getfqdn().partition(".")[2]  # of the headless service
    return f"{host.removesuffix(index)}0{'.' if domain else ''}{domain}"


def _job_name() -> str:
    """Name of the job, from that of the pod; the same in all its pods."""
    return os.environ.get("JOBSET_NAME") or socket.gethostname().rpartition("-")[0]
