"""Price stage `all_reduce`: the elapsed seconds of summing one flat gradient over ranks.

The probe's curve, measured while all ranks compute, is used where there is one. Between GPUs the
quickest of the algorithms is taken that NCCL has on the machine: a ring, a tree, and where GPUs
hang on a switch that adds (an NVSwitch of the third generation, NVLS), the switch (DEC-129). A ring
visits cliques one after the other, and is as fast as its slowest link with all who cross it.

In parts, the gradient is sent while the backward pass runs. Two thirds of forward_backward are the
backward pass (two of a layer's three products). Parts are taken to be ready evenly over it, and
have at least 1 MiB (runtime.stages).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import ranks_by_host
from gnnplan.planner.cost.rates import MachineTable, Rate, rate_per_rank
from gnnplan.planner.cost.stages.exchange_gpu import card_bandwidth
from gnnplan.planner.cost.stages.host import started_collective
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.machine.routes import Reader, Wiring, byte_seconds, shortest
from gnnplan.runtime.stages import most_parts

GRADIENT_ITEM_BYTES = 4


def gradient_bytes(num_parameters: int) -> int:
    """Return the bytes of the flat gradient, in float32."""
    return num_parameters * GRADIENT_ITEM_BYTES


def all_reduce_seconds(table: Table, message_bytes: float, ranks: int) -> float:
    """Return the measured seconds of an all-reduce while all ranks compute; 0 for one rank.

    Source: docs/modelling.md 4 and 6: the loaded curve at the gradient's own size.
    """
    return 0.0 if ranks <= 1 else table.at(bytes=message_bytes, ranks=float(ranks))


def ring_seconds(
    message_bytes: float, ranks: int, latency_seconds: float, bytes_per_second: float
) -> float:
    """Return the seconds of a ring all-reduce: 2 (P - 1) messages of n / P bytes each.

    T = 2 (P - 1) (a + n / (P B)), with a seconds per message and B bytes per second and direction
    of a link.

    Source: docs/formulas.md 8.3 [A3].

    >>> round(ring_seconds(4e6, 8, 10e-6, 100e9) * 1e6)
    210
    """
    if ranks <= 1:
        return 0.0
    return 2 * (ranks - 1) * (latency_seconds + message_bytes / (ranks * bytes_per_second))


TREE_SHARE = 0.92 / 2
"""Share of a link's bandwidth at which a tree sums: each byte goes up and comes back down."""
SWITCH_SHARE = 0.85 * 5 / 6
"""Share at which a switch of NVLinks sums and sends out what GPUs store in it."""
SWITCH_SECONDS = 25e-6
"""Latency of a sum in a switch, whatever the number of GPUs."""
ADDING_SWITCH = 3
"""First generation of NVSwitches that add."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """Links that an all-reduce of GPUs crosses."""

    devices: int
    """GPUs of a host."""
    hosts: int = 1
    start_seconds: float
    """Seconds before the first message moves."""
    hop_seconds: float
    """Latency of a message between two GPUs of a host."""
    bytes_per_second: float
    """Bandwidth between them, one direction; infinite for one GPU."""
    host_hop_seconds: float = 0.0
    """Latency of a message between two hosts."""
    card_bytes_per_second: float = math.inf
    """Bandwidth of a host's cards, one direction."""
    adds: bool = False
    """Whether all GPUs of a host hang on a switch that adds."""

    @property
    def ranks(self) -> int:
        """Return the number of GPUs."""
        return self.devices * self.hosts

    @property
    def slowest(self) -> float:
        """Return the bandwidth of the slowest link of a way over all GPUs."""
        return min(self.bytes_per_second, self.card_bytes_per_second)


def algorithm_seconds(message_bytes: float, fabric: Fabric) -> dict[str, float]:
    """Return the seconds of an all-reduce by each algorithm that a fabric has.

    ring    a + 2 (P - H) l1 + 2 (H - 1) l2 + 2 (P - 1)/P n / B
    tree    a + 2 ((g - 1) l1 + ceil(log2 H) l2) + n / (.46 B)
    switch  25 us + 2 ceil(log2 H) l2 + max(n / (.71 B1), H > 1: n / (.46 B2))

    with g GPUs on each of H hosts, P = g H, l1 and l2 seconds of a hop inside a host and between
    two, B1 and B2 bytes per second of the GPUs' links and of a host's cards, B the lesser, and a
    seconds before the first message. A tree is a chain inside a host.

    Source: docs/formulas.md 8.3 [A3].

    >>> box = Fabric(devices=8, start_seconds=1e-5, hop_seconds=4e-6, bytes_per_second=4e11,
    ...     adds=True)
    >>> {k: round(1e6 * t) for k, t in algorithm_seconds(4e6, box).items()}
    {'ring': 84, 'tree': 88, 'switch': 39}
    """
    ranks, hosts = fabric.ranks, fabric.hosts
    depth = 2 * math.ceil(math.log2(hosts)) * fabric.host_hop_seconds
    longer = 2 * (hosts - 1) * (fabric.host_hop_seconds - fabric.hop_seconds)
    found = {
        "ring": fabric.start_seconds
        + longer
        + ring_seconds(message_bytes, ranks, fabric.hop_seconds, fabric.slowest),
        "tree": fabric.start_seconds
        + 2 * (fabric.devices - 1) * fabric.hop_seconds
        + depth
        + message_bytes / (TREE_SHARE * fabric.slowest),
    }
    if fabric.adds:
        inside = message_bytes / (SWITCH_SHARE * fabric.bytes_per_second)
        across = message_bytes / (TREE_SHARE * fabric.card_bytes_per_second)
        found["switch"] = SWITCH_SECONDS + depth + max(inside, across)
    return found


def exposed_bucket_seconds(
    ready_seconds: Sequence[float], bucket_seconds: Sequence[float]
) -> float:
    """Return the seconds of communication after the last gradient is ready.

    f_k = max(f_{k-1}, r_k) + T_k;  exposed = max(0, f_K - r_K). Bucket k, in backward order, is
    ready at r_k, and its all-reduce takes T_k.

    Source: docs/formulas.md 8.3 [A3].

    >>> t = [ring_seconds(n, 4, 10e-6, 10e9) for n in (25e6, 5e6)]
    >>> round(exposed_bucket_seconds([5e-3, 10e-3], t) * 1e3, 2)
    0.81
    """
    finished = 0.0
    for ready, seconds in zip(ready_seconds, bucket_seconds, strict=True):
        finished = max(finished, ready) + seconds
    return max(0.0, finished - ready_seconds[-1])


def exposed_seconds(comm_seconds: float, hidden_seconds: float, eta: float) -> float:
    """Return the seconds of communication that computation beside it does not hide.

    exposed = max(0, T_comm - eta T_hidden); eta = 0 where it was not measured.

    Source: docs/modelling.md 5.

    >>> exposed_seconds(6.0, 10.0, 0.5), exposed_seconds(6.0, 0.0, 0.5)
    (1.0, 6.0)
    """
    return max(0.0, comm_seconds - eta * hidden_seconds)


def gpu_all_reduce(machine: MachineModel, candidate: Candidate, message_bytes: float) -> Rate:
    """Price the all-reduce of a gradient over the candidate's GPUs, once the host has started it.

    Source: docs/formulas.md 8.3 [A3], with tables `gpu_message` and (several hosts) `host_message`.
    """
    if candidate.num_ranks == 1:
        return Rate(seconds=0.0, spread=0.0, provenance="derived: one rank has nothing to sum")
    if measured := started_collective(
        machine, MachineTable.NCCL_ALL_REDUCE, candidate, message_bytes
    ):
        return measured
    if machine.backend is not None:
        return Rate(
            seconds=machine.backend.all_reduce_seconds(message_bytes, candidate.num_ranks),
            spread=machine.table(MachineTable.GPU_MESSAGE).spread,
            provenance=f"{machine.backend.provenance}: {machine.backend.name}'s rate, in a ring",
        )
    fabric = fabric_of(machine, candidate)
    found = algorithm_seconds(message_bytes, fabric)
    name = min(found, key=lambda each: found[each])
    over = "hosts and their cards" if fabric.hosts > 1 else "the links between the GPUs"
    return Rate(
        seconds=found[name],
        spread=machine.table(MachineTable.GPU_MESSAGE).spread,
        provenance=f"derived: {ALGORITHMS[name]} over {over} + expected straggler",
    )


ALGORITHMS = {"ring": "a ring", "tree": "a tree", "switch": "sums in the switch (NVLS)"}
"""Words for each algorithm."""


def fabric_of(machine: MachineModel, candidate: Candidate) -> Fabric:
    """Return the links that an all-reduce of the candidate's GPUs crosses."""
    by_host = ranks_by_host(machine, candidate)
    mine = [[candidate.gpus[rank] for rank in ranks] for ranks in by_host.values()]
    several = len(mine) > 1
    return Fabric(
        devices=max(len(gpus) for gpus in mine),
        hosts=len(mine),
        start_seconds=rate_per_rank(machine, MachineTable.GPU_MESSAGE, candidate),
        hop_seconds=max(_ring_of(machine, gpus)[1] for gpus in mine),
        bytes_per_second=min(ring_bandwidth(machine, gpus) for gpus in mine),
        host_hop_seconds=machine.table(MachineTable.HOST_MESSAGE).at(ranks=1.0) if several else 0.0,
        card_bytes_per_second=card_bandwidth(machine) if several else math.inf,
        adds=all(_hangs_on_adder(machine, gpus) for gpus in mine),
    )


def _hangs_on_adder(machine: MachineModel, gpus: list[str]) -> bool:
    """Tell whether each of a host's several GPUs has a link into a switch that adds."""
    adders = {s.name for s in machine.switches if s.generation >= ADDING_SWITCH}
    memory = {p.name: p.memory for p in machine.gpus}
    joined = {x.source for x in machine.links if x.target in adders}
    return len(gpus) > 1 and all(memory[name] in joined for name in gpus)


def ring_bandwidth(machine: MachineModel, gpus: list[str]) -> float:
    """Return the bytes per second of each hop of a ring in use; infinite for one GPU."""
    return _ring_of(machine, gpus)[0]


def _ring_of(machine: MachineModel, gpus: list[str]) -> tuple[float, float]:
    """Return the bytes per second and the latency of the slowest hop of a ring in use."""
    if len(gpus) == 1:
        return math.inf, 0.0
    memory = {p.name: p.memory for p in machine.gpus}
    return _ring(Wiring.of(machine), tuple(memory[g] for g in gpus))


@functools.lru_cache(maxsize=256)
def _ring(machine: Wiring, stops: tuple[str, ...]) -> tuple[float, float]:
    """Compute `_ring_of` over the GPUs' memories."""
    hops: list[Reader] = []
    for a, b in zip(stops, [*stops[1:], stops[0]], strict=True):
        way = shortest(machine, a, b)
        if way is None:
            raise MachineError(
                f"machine {machine.name}: expected a way from {a} to {b}, found none; probe it "
                "again"
            )
        hops.append(Reader(name=b, routes=[way]))
    latency = max(route.latency_seconds for hop in hops for route in hop.routes)
    return 1 / max(byte_seconds(hops).values()), latency


BACKWARD = 2 / 3
"""Share of forward_backward in which gradients become ready."""
LOSS_BYTES = 4.0
"""Bytes of the loss, which is sent last, by itself."""


def exposed_in_parts(
    all_reduce: Callable[[float], float],
    message_bytes: float,
    forward_backward: float,
    eta: float,
) -> float:
    """Return the seconds of an all-reduce in parts that the training thread waits for.

    sum_k T_k - eta (sum_k T_k - exposed) + T(loss), with exposed as for buckets [A3]. `all_reduce`
    gives the seconds of a message's bytes; eta is the hidden share of what compute could hide.

    Source: docs/formulas.md 8.3 [A3]; docs/modelling.md 5.

    >>> def ring(n):
    ...     return 1e-4 + n / 1e9
    >>> round(1e3 * exposed_in_parts(ring, 8 * 2**20, 0.1, 1.0), 2)  # the last part, and the loss
    1.25
    >>> exposed_in_parts(ring, 8 * 2**20, 0.1, 0.0) > ring(8 * 2**20)  # nothing hidden
    True
    """
    parts = most_parts(message_bytes)
    each = all_reduce(message_bytes / parts)
    ready = [forward_backward * (1 - BACKWARD * (1 - (k + 1) / parts)) for k in range(parts)]
    hidden = parts * each - exposed_bucket_seconds(ready, [each] * parts)
    return parts * each - eta * hidden + all_reduce(LOSS_BYTES)
