"""Write a plan's job for a scheduler: hosts, and the cores, GPUs and memory that each needs.

Schedulers give every host the same, so each number is that of the host that needs most.

Kubernetes: a PyTorchJob (kubeflow.org/v1), host 0 the master, the others workers. The operator
gives each pod its host's number as $RANK; the container runs gnnplan without a shell. Plan, graph
and script come from one volume claim whose folders mirror their absolute paths. Where a host has
several ranks its pod mounts a volume of memory, whose use counts towards the container's limit.

Slurm: a batch script with one task per host, which starts the host's own ranks under torchrun.
The user's words that reach the shell are quoted; directives hold only numbers and a name of
letters, digits and hyphens. Time limit, partition and account are sbatch's own options.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.units import counted
from gnnplan.runtime.identity import cores_of
from gnnplan.runtime.launch.hosts import ranks_by_host
from gnnplan.runtime.limits import host_bytes
from gnnplan.runtime.plan.schema import Plan

MEMORY_MARGIN = 1.1
"""Factor on the plan's predicted sum, since schedulers end what exceeds its limit."""
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """Job on one or several hosts."""

    plan: Plan
    name: str
    """Name of the plan's folder; a scheduler's file holds it only as `safe_name`."""
    verb: str
    """Either train or launch."""
    arguments: list[str]
    """Words after the verb and those of the host, the plan's folder first."""
    resumes: bool
    """Whether --resume makes the command continue from its last checkpoint."""
    folders: list[Path]
    """Folders that every host must see under the same path: plan, graph and script."""

    @property
    def ranks(self) -> list[int]:
        """Return the number of ranks of each host, hosts in order."""
        return [len(devices) for devices in ranks_by_host(self.plan)]

    @property
    def shares(self) -> bool:
        """Return whether a host has several ranks, which share memory."""
        return max(self.ranks) > 1

    @property
    def cores(self) -> int:
        """Return the cores of a host: its ranks' threads, at most those it was planned with."""
        return cores_of(self.plan, max(self.ranks))

    @property
    def gpus(self) -> int:
        """Return the GPUs of a host."""
        return max(
            sum(device.needs_gpu for device in devices) for devices in ranks_by_host(self.plan)
        )

    @property
    def memory_mib(self) -> int | None:
        """Return a host's memory in MiB, with the margin; None where the plan predicts none."""
        sums = [host_bytes(self.plan, devices) for devices in ranks_by_host(self.plan)]
        known = [each for each in sums if each is not None]
        return -(-round(max(known) * MEMORY_MARGIN) // _MIB) if known else None

    @property
    def safe_name(self) -> str:
        """Return the name in letters, digits and hyphens, at most 40, a letter first."""
        text = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"gnnplan-{text}"[:40].rstrip("-")


def escaped_comment(text: str) -> str:
    """Return a text for a comment: one line, printable characters alone."""
    return "".join(c if c.isprintable() else "?" for c in text)


PORT = 29400
RESTARTS = 3
VOLUME = "gnnplan-data"
MEMORY_VOLUME = "gnnplan-memory"
SHARED_MEMORY = "/dev/shm"
"""Where the ranks of a host share memory, and NCCL does; a pod has 64 MiB there by itself."""


def kubernetes_job(job: JobSpec, *, image: str, claim: str) -> str:
    """Return the YAML text of a job; apply it with kubectl.

    Args:
        job: what to run.
        image: container image with gnnplan in it.
        claim: persistent volume claim with the job's folders at their absolute paths.

    Raises:
        SettingsError: Kubernetes cannot mount a folder.
    """
    import yaml  # on use: the command line starts without it

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
                "volumes": [
                    {"name": VOLUME, "persistentVolumeClaim": {"claimName": claim}},
                    *(
                        [{"name": MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}}]
                        if job.shares
                        else []
                    ),
                ],
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
        "volumeMounts": [
            *(_mount(folder) for folder in job.folders),
            *([{"name": MEMORY_VOLUME, "mountPath": SHARED_MEMORY}] if job.shares else []),
        ],
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
    """Return a word in which Kubernetes expands no $(VARIABLE)."""
    return word.replace("$(", "$$(")


_HEAD = """\
#!/bin/bash
# Plan {plan}: {ranks} on {hosts}. Written by gnnplan {version}.
# Submit with sbatch; add --time, --partition and --account there.
{directives}

set -euo pipefail
"""
_MEET = """
# Host 0 serves the rendezvous; the port differs between jobs that share a host.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
endpoint="${nodes%%$'\\n'*}:$((20000 + SLURM_JOB_ID % 20000))"
"""


def slurm_script(job: JobSpec) -> str:
    """Return the text of a batch script; submit it with sbatch."""
    several = len(job.ranks) > 1
    head = _HEAD.format(
        plan=escaped_comment(f"{job.name} ({job.plan.plan_id[:12]})"),
        ranks=counted(sum(job.ranks), "rank"),
        hosts=counted(len(job.ranks), "host"),
        version=escaped_comment(job.plan.version),
        directives="\n".join(f"#SBATCH {line}" for line in _directives(job)),
    )
    return head + (_MEET if several else "") + _command(job, several)


def _directives(job: JobSpec) -> list[str]:
    lines = [
        f"--job-name={job.safe_name}",
        f"--nodes={len(job.ranks)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cores}",
    ]
    if job.gpus:
        lines.append(f"--gpus-per-node={job.gpus}")
    if job.memory_mib is not None:
        lines.append(f"--mem={job.memory_mib}M")
    lines.append("--open-mode=append")
    if job.resumes:
        lines.append("--requeue")
    return lines


def _command(job: JobSpec, several: bool) -> str:
    # The words of the host come first: what follows a script's name is the script's own.
    words = [sys.executable, "-m", "gnnplan.planner", job.verb]
    place = '--node-rank "$SLURM_NODEID" --rdzv-endpoint "$endpoint" ' if several else ""
    resume = "${SLURM_RESTART_COUNT:+--resume} " if job.resumes else ""
    inner = f'exec {shlex.join(words)} {place}{resume}"$@"'
    again = "; a job that Slurm requeues goes on from its last checkpoint" if job.resumes else ""
    comment = f"\n# One task per host{again}.\n"
    export = "export endpoint\n" if several else ""
    arguments = shlex.join(job.arguments)
    # From Slurm 22.05 to 23.02 srun takes no cores from sbatch: the task would be kept to one.
    srun = f"srun --kill-on-bad-exit=1 --cpus-per-task={job.cores}"
    return f"{comment}{export}{srun} bash -c {shlex.quote(inner)} gnnplan \\\n  {arguments}\n"
