"""What a scheduler must know of a plan: hosts, and the cores, GPUs and memory that each needs.

Schedulers give every host the same, so each number is that of the host that needs most.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.launch_hosts import ranks_by_host
from runtime.plan import Device, Plan

MEMORY_MARGIN = 1.1
"""Asked for over the plan's sum: schedulers end what passes its limit, and the sum is a
prediction."""
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One job on one or several hosts."""

    plan: Plan
    name: str
    """Of the plan's folder; a scheduler's file holds it only as `safe_name`."""
    verb: str
    """train or launch."""
    arguments: list[str]
    """Command-line words after the verb and the words of this host, the plan's folder first."""
    resumes: bool
    """True where --resume makes the command go on from its last checkpoint."""
    folders: list[Path]
    """What every host must see under the same path: plan, graph and script."""

    @property
    def ranks(self) -> list[int]:
        """Ranks of each host, hosts in order."""
        return [len(devices) for devices in ranks_by_host(self.plan)]

    @property
    def cores(self) -> int:
        """Cores of a host: the thread budget of each of its ranks."""
        threads = self.plan.strategy.threads
        return max(self.ranks) * (threads.compute + threads.sample)

    @property
    def gpus(self) -> int:
        """GPUs of a host."""
        return max(
            sum(device.kind == "cuda" for device in devices) for devices in ranks_by_host(self.plan)
        )

    @property
    def memory_mib(self) -> int | None:
        """Memory of a host in MiB, with the margin; None where the plan predicts none."""
        sums = [host_bytes(self.plan, devices) for devices in ranks_by_host(self.plan)]
        known = [each for each in sums if each is not None]
        return -(-round(max(known) * MEMORY_MARGIN) // _MIB) if known else None

    @property
    def safe_name(self) -> str:
        """The name with letters, digits and hyphens alone, as DNS and directives want it.

        At most 40 characters, the first a letter.
        """
        text = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"gnnplan-{text}"[:40].rstrip("-")


def host_bytes(plan: Plan, devices: Sequence[Device]) -> int | None:
    """Bytes of host memory that the ranks of one host take: their own, and what they share.

    The part `ranks` of a host's sum is left out, since it is the sum of the ranks' own totals. GPU
    ranks' rows live in device memory; their total is an upper bound of what they hold on the host.

    Returns:
        None where the plan predicts no memory.
    """
    memories = plan.prediction.memory_bytes
    own = [memories[name].total for d in devices if (name := f"rank{d.rank}") in memories]
    shared = [
        size
        for name, use in memories.items()
        if name in {device.memory for device in devices}
        for part, size in use.parts.items()
        if part != "ranks"
    ]
    return sum(own) + sum(shared) if own or shared else None


def escaped_comment(text: str) -> str:
    """A text for a comment: one line, printable characters alone."""
    return "".join(c if c.isprintable() else "?" for c in text)
