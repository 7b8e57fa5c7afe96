"""A batch script for Slurm: one task per host, each starts the host's own ranks under torchrun.

Everything of the user's that reaches the shell is quoted; directives hold only numbers and a name
of letters, digits and hyphens. Time limit, partition and account are sbatch's own options, which
win over a script's directives.
"""

import shlex
import sys

from planner.executors.job import JobSpec, escaped_comment
from planner.units import counted

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
    """The text of a batch script; submit it with sbatch."""
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
    words = [sys.executable, "-m", "planner", job.verb]
    place = '--node-rank "$SLURM_NODEID" --rdzv-endpoint "$endpoint" ' if several else ""
    resume = "${SLURM_RESTART_COUNT:+--resume} " if job.resumes else ""
    inner = f'exec {shlex.join(words)} {place}{resume}"$@"'
    again = "; a job that Slurm requeues goes on from its last checkpoint" if job.resumes else ""
    comment = f"\n# One task per host{again}.\n"
    export = "export endpoint\n" if several else ""
    arguments = shlex.join(job.arguments)
    return (
        f"{comment}{export}srun --kill-on-bad-exit=1 bash -c {shlex.quote(inner)} gnnplan \\\n"
        f"  {arguments}\n"
    )
