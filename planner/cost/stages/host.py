"""Count what the host starts for a step on a GPU, and price it: one formula for every way.

    T_host = t_s (K_sample + K_gather + K_copy + K_blocks + K_training)

K counts kernels, copies and collectives that the runtime starts, and in training the nodes of the
backward pass too, each of which is a turn of Python or of the engine; t_s is the host's seconds of
one, Python included. Over L layers or hops:

    K_sample     the sampler's own (stages.sample), by itself, in a stack, or around a CUDA graph;
                 461 L more for dependent numbers, and 42 L for lists that are laid out for them;
                 84 L more where ranks share a batch, 4 L of them to hand ids over
    K_gather     3: the kernel, its counters set to zero and copied back; 98 or 146 more of a cache
                 that fills itself; 23 more where rows of peers are exchanged, 3 of a shared batch
    K_copy       2: seeds and labels
    K_blocks     GCN's edge weights, 36 L; other models add none
    K_training   a + b L forward and back, with the loss; 2 for the update; 1 per part of the
                 gradients that ranks sum; 8 (L - 1) for hidden rows of a shared batch

tests/planner/cost/stages/test_gpu_launches.py, test_gpu_caches.py and test_shared_launches.py count
all of them again (DEC-114, DEC-127).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.rates import MachineTable, Rate, measured_collective
from gnnplan.planner.cost.stages.sample import batch_launches
from gnnplan.planner.machine.model import MachineModel
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER, number, sampler_or_unknown

GATHER_STARTS = 3
"""Starts of a gather: its kernel, and the counters' reset and copy."""
COPY_STARTS = 2
"""Copies per batch: seeds and labels."""
UPDATE_STARTS = 2
"""Starts of an update by Adam in torch's fused form."""
TRAINING_STARTS = {"sage": (8, 17), "gcn": (8, 14), "gat": (13, 96), "rgcn": (47, 31)}
"""a, b of a pass forward and back, by model."""
REDUCE_STARTS = 1
"""Starts of summing one part of the gradients over ranks."""
RELATION_STARTS = 13.5
"""Starts more per layer for each relation of R-GCN."""
BLOCK_STARTS = {"gcn": 36}
"""Starts per layer of adding a model's edge weights."""
MIX_STARTS = 461
"""Kernels per hop that mix two words, beside those of independent draws (DEC-111)."""
LAYOUT_STARTS = 42
"""Kernels per hop that lay lists out where independent draws scan them in place."""
SELECTION_STARTS = 20
"""Kernels that choose the slots with the smallest keys of 64 bits, and sort them."""
CACHE_STARTS = {"lru": 78 + SELECTION_STARTS, "clock": 126 + SELECTION_STARTS}
"""Kernels of a cache that fills itself, by policy."""
SHARED_STARTS = 80
"""Kernels per hop that number, deal and ask for a shared batch's vertices, beside drawing."""
ASK_STARTS = 4
"""Starts of handing ids over: their counts copied, sent and copied back, and the ids."""
ROW_STARTS = 1
"""Starts of handing rows over whose counts are known."""
FETCH_STARTS = 18
"""Kernels of an exchange of peers' rows: located, sorted by rank, counted, served and placed."""
PACK_STARTS = 2
"""Kernels of a shared batch's rows: picked, and put in place."""
HIDDEN_STARTS = (2, 4)
"""Starts per inner layer of a shared batch's hidden rows: forward, and back with its node."""
START_PER_KERNEL = 2.35
"""t_s over the seconds of starting an empty kernel, where only those are known (DEC-114)."""


def start_seconds(machine: MachineModel) -> float:
    """Return the host's seconds of starting one kernel, with the Python that leads to it."""
    if MachineTable.GPU_START in machine.tables:
        return machine.table(MachineTable.GPU_START).at(ranks=1.0)
    return START_PER_KERNEL * machine.table(MachineTable.GPU_KERNEL).at(ranks=1.0)


STARTS_MEASURED = {MachineTable.NCCL_ASKED: 2}
"""Starts of the host within a measured collective, where they are not one."""


def started_collective(
    machine: MachineModel, name: MachineTable, candidate: Candidate, num_bytes: float
) -> Rate | None:
    """Look up a measured collective without the host's starts in it, which steps count."""
    found = measured_collective(machine, name, candidate, num_bytes)
    if found is None:
        return None
    started = STARTS_MEASURED.get(name, 1) * start_seconds(machine)
    return replace(found, seconds=max(0.0, found.seconds - started))


@dataclass(frozen=True, kw_only=True, slots=True)
class Starts:
    """Starts of the host for one batch, by what they are for."""

    draw: float
    """Those of the sampler's own draws."""
    mix: float
    """Those of dependent numbers."""
    share: float
    """Those of a shared batch's ids, in sampling."""
    gather: float
    cache: float
    """Those of a cache that fills itself, in gathering."""
    pack: float
    """Those of a shared batch's rows, in gathering."""
    copy: float

    @property
    def sample(self) -> float:
        """Return the starts of stage `sample`."""
        return self.draw + self.mix + self.share

    @property
    def gathering(self) -> float:
        """Return the starts of stage `gather`."""
        return self.gather + self.cache + self.pack

    @property
    def loader(self) -> float:
        """Return the starts of a batch before training, edge weights apart."""
        return self.sample + self.gathering + self.copy


def loader_starts(
    candidate: Candidate, hops: int, *, sampler: str = DEFAULT_SAMPLER, every_hop: bool = False
) -> Starts:
    """Return what the host starts to make one of a candidate's batches.

    >>> from gnnplan.planner.candidate import list_cores, make_candidate
    >>> loader_starts(make_candidate(list_cores(1)), 2).loader
    43.0
    """
    shared = candidate.batching == "cooperative"
    cache = candidate.cache
    return Starts(
        draw=batch_launches(candidate, hops, sampler=sampler, every_hop=every_hop),
        mix=mix_starts(candidate.sampler.parameters, hops, sampler) / candidate.bulk_batches,
        share=float((SHARED_STARTS + ASK_STARTS) * hops * shared),
        gather=GATHER_STARTS,
        cache=0.0 if cache is None else float(CACHE_STARTS[cache]),
        pack=float((PACK_STARTS + ROW_STARTS) * shared),
        copy=COPY_STARTS,
    )


def mix_starts(parameters: Mapping[str, float | str], hops: int, sampler: str) -> float:
    """Return what the host starts for a stack's dependent numbers; 0 where none are mixed.

    Frozen batches, and all of one frozen sample, take the words of one stream as they are.
    """
    kappa = number(sampler, parameters, "kappa") if "kappa" in parameters else 1.0
    if kappa <= 1 or math.isinf(kappa) or parameters.get("dependence") == "frozen":
        return 0.0
    laid = 0 if sampler_or_unknown(sampler).layerwise else LAYOUT_STARTS
    return float((MIX_STARTS + laid) * hops)


def pass_starts(model: str, layers: int, relations: int = 0) -> float:
    """Return what the host starts for a pass forward and back, the loss included.

    >>> pass_starts("sage", 3), pass_starts("gcn", 2)
    (59.0, 36.0)
    """
    constant, per_layer = TRAINING_STARTS[model]
    return float(constant + (per_layer + RELATION_STARTS * relations) * layers)


def hidden_starts(layers: int) -> float:
    """Return what the host starts to hand a shared batch's hidden rows over, there and back.

    >>> hidden_starts(1)
    8.0
    """
    return float(layers * (sum(HIDDEN_STARTS) + 2 * ROW_STARTS))


def block_starts(model: str, layers: int) -> float:
    """Return what the host starts to add edge weights to a batch.

    >>> block_starts("gcn", 2), block_starts("sage", 2)
    (72.0, 0.0)
    """
    return float(BLOCK_STARTS.get(model, 0) * layers)


SEED_BYTES = 16
"""Bytes of a seed's id and its label."""


def copy_seconds(seeds: float, seconds_per_byte: float, kernel_seconds: float) -> float:
    """Return the seconds of copying seeds and labels from the host to the device.

    T = 2 t_k + 16 B c: B seeds of this rank, c seconds per byte while all ranks copy, t_k of
    launching one of the two copies. Rows are read by the GPU itself, in `gather`.

    Source: derived.

    >>> round(1e6 * copy_seconds(1000.0, 1e-10, 1e-5), 1)
    21.6
    """
    return COPY_STARTS * kernel_seconds + SEED_BYTES * seeds * seconds_per_byte
