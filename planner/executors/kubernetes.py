"""A PyTorchJob for Kubernetes (kubeflow.org/v1): host 0 is the master, the others are workers.

The operator gives each pod its number among the hosts as $RANK; the container runs gnnplan without
a shell between. Plan, graph and script come from one volume claim whose folders mirror their
absolute paths.
"""

from pathlib import Path
from typing import Any

import yaml

from planner.errors import SettingsError
from planner.executors.job import JobSpec

PORT = 29400
RESTARTS = 3
VOLUME = "gnnplan-data"


def kubernetes_job(job: JobSpec, *, image: str, claim: str) -> str:
    """The YAML text of a job; apply it with kubectl.

    Args:
        job: what to run.
        image: container image with gnnplan in it.
        claim: persistent volume claim that holds the job's folders at their absolute paths.

    Raises:
        SettingsError: a folder that Kubernetes cannot mount.
    """
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.safe_name, "annotations": {"gnnplan/plan-id": job.plan.plan_id}},
        "spec": {
            "runPolicy": {"backoffLimit": RESTARTS, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {
                name: _replicas(job, count, image, claim)
                for name, count in (("Master", 1), ("Worker", len(job.ranks) - 1))
                if count
            },
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def _replicas(job: JobSpec, count: int, image: str, claim: str) -> dict[str, Any]:
    return {
        "replicas": count,
        "restartPolicy": "OnFailure" if job.resumes else "Never",
        "template": {
            "spec": {
                "containers": [_container(job, image)],
                "volumes": [{"name": VOLUME, "persistentVolumeClaim": {"claimName": claim}}],
            }
        },
    }


def _container(job: JobSpec, image: str) -> dict[str, Any]:
    words = [_literal(word) for word in job.arguments]
    place: list[str] = []
    if len(job.ranks) > 1:
        endpoint = f"{job.safe_name}-master-0:{PORT}"
        place = ["--node-rank", "$(RANK)", "--rdzv-endpoint", endpoint]
    # A pod that starts again cannot tell: without a checkpoint, --resume starts at the beginning.
    resume = ["--resume"] if job.resumes and "--resume" not in words else []
    resources = {"cpu": str(job.cores)}
    if job.memory_mib is not None:
        resources["memory"] = f"{job.memory_mib}Mi"
    if job.gpus:
        resources["nvidia.com/gpu"] = str(job.gpus)
    return {
        "name": "pytorch",  # the operator looks for this name
        "image": image,
        "command": ["gnnplan"],
        "args": [job.verb, *place, *resume, *words],
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": [_mount(folder) for folder in job.folders],
    }


def _mount(folder: Path) -> dict[str, str]:
    if ":" in str(folder):
        raise SettingsError(
            f"{folder}: expected a path without a colon, Kubernetes mounts no other"
        )
    return {
        "name": VOLUME,
        "mountPath": str(folder),
        "subPath": str(folder.relative_to(folder.anchor)),
    }


def _literal(word: str) -> str:
    """A word in which Kubernetes expands no $(VARIABLE)."""
    return word.replace("$(", "$$(")
