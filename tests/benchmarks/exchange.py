"""Rows between two hosts: pair by pair, as the runtime sends them, beside gloo's all-to-all.

    python -m tests.benchmarks.exchange --json [--rate-gbit 1] [--rounds 5]

Both run in the probe's small training step (compute, ids, rows, compute, gradients), in turn, on
two network namespaces joined by a link of that rate; a value is the median over rounds of the
probe's own figure: from the last host's entry to the last one's exit. `wire` is the time that the
bytes of one direction take at the link's rate. Needs root.

(`... exchange RANK ADDRESS ROUNDS OUT` is one of its two ranks.)
"""

import argparse
import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.probe.collectives import CALLS, SHORT, exchanged, one_core_each, take_steps
from gnnplan.planner.probe.context import FULL, MIB
from gnnplan.planner.probe.timing import make_burst
from tests.benchmarks.common import Spread, record
from tests.hosts import INTERFACE, Hosts

SIZES = (MIB // 4, MIB, 4 * MIB, 8 * MIB, 16 * MIB)
"""Bytes that a rank hands over, half of them to itself."""
PORT = 29540
HOSTS = ("a", "b")


def rank_main(rank: int, address: str, rounds: int, out: Path) -> None:
    """One rank; rank 0 writes seconds by size and way."""
    import torch
    import torch.distributed as dist

    from gnnplan.runtime.comm.collectives import Communicator

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    groups = dist.new_group([0, 1]), dist.new_group([0, 1])
    rows = FULL.exchange_burst_rows
    compute, short = make_burst(rows), make_burst(rows // SHORT)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for size in SIZES:
            for pairwise in (False, True):
                with one_core_each(rank, 2):
                    exchanging, reducing = (
                        Communicator(group, between_hosts=pairwise) for group in groups
                    )
                    mine = take_steps(
                        exchanging, reducing, size, FULL.exchange_steps, compute, short
                    )
                every: list[Any] = [None, None]
                dist.all_gather_object(every, mine)
                rows_moments = np.array(every)[:, :, CALLS.index("all_to_all")]
                seconds = exchanged(rows_moments).seconds.value  # one machine, one clock
                found.setdefault(f"{size} {pairwise}", []).append(seconds)
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Start both ranks and print a line per size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted: the output is JSON always")
    parser.add_argument("--rate-gbit", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(arguments)
    rate = asked.rate_gbit * 1e9
    with tempfile.TemporaryDirectory() as folder, Hosts(HOSTS, rate_bits_per_second=rate) as hosts:
        out = Path(folder) / "seconds.json"
        words = [sys.executable, "-m", "tests.benchmarks.exchange"]
        each = [hosts.address("a"), str(asked.rounds), str(out)]
        started = [
            hosts.start(name, [*words, str(rank), *each], env={"GLOO_SOCKET_IFNAME": INTERFACE})
            for rank, name in enumerate(HOSTS)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"expected both ranks to end well, found exit codes {codes}")
        found = json.loads(out.read_text())
    for size in SIZES:
        collective, pairwise = (Spread.of(found[f"{size} {way}"]) for way in (False, True))
        record(
            f"exchange_{size // 1024}kib",
            pairwise,
            "s",
            baseline=collective.median,
            ratio=collective.median / pairwise.median,
            baseline_p10=collective.p10,
            baseline_p90=collective.p90,
            wire=size / 2 * 8 / rate,
        )


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].isdigit():
        rank_main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(sys.argv[1:])
