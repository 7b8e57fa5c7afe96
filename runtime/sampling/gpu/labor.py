"""LABOR on a GPU in all its forms: the batches of `LaborSampler`, seed for seed.

LABOR-0 by threshold scans the rows in place (`gpu.choose`). Everything else lays the hop's rows
out: one candidate number, word and probability per vertex, the passes of the fixed point as kernels
over rows (`gpu.segments`), exactly-k by the k-th smallest key of a row. The maximum over a vertex's
rows is an atomic maximum, which does not depend on the order. LABOR-* waits once per pass, to see
whether it gained enough. Weights agree with the CPU's to float32's last place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.features.device_rows import copy_list
from gnnplan.runtime.sampling.checks import check_edge_weight
from gnnplan.runtime.sampling.choose.labor import MAX_PASSES
from gnnplan.runtime.sampling.dependent import StreamPolicy
from gnnplan.runtime.sampling.gpu.choose import (
    count_reads,
    kernel_unit,
    list_of,
    lists_of,
    put_edges,
    read_and_keep,
    row_ends,
    row_tile,
    rows_left,
    share_of,
    store_total,
    tiles,
)
from gnnplan.runtime.sampling.gpu.hops import (
    AbstractDeviceHops,
    BlockEdges,
    Drawn,
    HopDraws,
    HopRows,
)
from gnnplan.runtime.sampling.gpu.neighbor import SCANS, scan_rows
from gnnplan.runtime.sampling.gpu.relabel import (
    AGE,
    FRESH,
    DeviceRelabel,
    HopEdges,
    PaddedTable,
    chunk_of,
    programs_for,
)
from gnnplan.runtime.sampling.gpu.rng import LOWEST, high_bits, hop_words, unit
from gnnplan.runtime.sampling.gpu.segments import (
    NEVER,
    WholeRows,
    row_scales,
    segment_counts,
    segment_largest,
    segment_sums,
    smallest,
    whole_rows,
)
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.labor import Form, check_form, check_tolerance, check_variant
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.rng import Purpose
from gnnplan.runtime.sampling.statistics import Estimator


@dataclass(frozen=True, slots=True)
class Candidates:
    """Vertices that a row of the hop may draw, numbered once; known ones come first."""

    ids: Tensor
    numbers: Tensor
    num_known: int

    @staticmethod
    def collect(whole: WholeRows, known: Tensor, device: torch.device) -> "Candidates":
        """Number the candidates of whole rows; waits for their number."""
        relabel = DeviceRelabel(device)
        relabel.add(known, torch.tensor([known.numel()], device=device), [])
        relabel.num_known = known.numel()
        numbers, new = relabel.number(whole.values, [known])
        return Candidates(torch.cat([known, new]), numbers, known.numel())


def _solve(
    sampler: "DeviceLaborSampler",
    whole: WholeRows,
    found: Candidates,
    weight: Tensor | None,
    everything: Tensor,
    fanout: int,
) -> tuple[Tensor, Tensor]:
    """Return c_s of every row, and what it multiplies at each edge: p_t, or A_ts before passes.

    The passes are those of `choose.labor.LaborSolver`; `weight` is A_ts of each edge, float64, or
    None; `everything` marks rows that are taken whole.
    """
    star = sampler.variant == "star"
    pi = torch.ones(found.ids.numel(), dtype=torch.float64, device=found.ids.device)
    excess, squares = _excess(whole, weight, everything, fanout)
    each = torch.ones_like(pi)[found.numbers] if weight is None else weight
    scale = _scales(whole, each, weight, squares, excess, everything)
    top = _highest(whole, found, scale, weight, each)
    expected = _expected_new(top, pi, found.num_known) if star else 0.0
    for _ in range(MAX_PASSES if star else int(sampler.variant)):
        pi = pi * top
        each = pi[found.numbers]
        scale = _scales(whole, each, weight, squares, excess, everything)
        top = _highest(whole, found, scale, weight, None)
        if star:
            before, expected = expected, _expected_new(top, pi, found.num_known)
            if before - expected <= sampler.tolerance * before:
                break
    return scale, each


def _excess(
    whole: WholeRows, weight: Tensor | None, everything: Tensor, fanout: int
) -> tuple[Tensor, Tensor | None]:
    """Return a^2/k - a^2/d of each row that is not taken whole (else 0), and A^2 of each edge."""
    if weight is None:
        degree = whole.rows.degrees.to(torch.float64)
        excess, squares = degree * (degree / fanout) - degree, None
    else:
        total = segment_sums(whole.ptr, weight)
        able = segment_counts(whole.ptr, weight > 0).clamp(min=1).to(torch.float64)
        excess, squares = total * total * (1.0 / fanout - 1.0 / able), weight * weight
    return torch.where(everything, 0.0, excess), squares


def _scales(
    whole: WholeRows,
    each: Tensor,
    weight: Tensor | None,
    squares: Tensor | None,
    excess: Tensor,
    everything: Tensor,
) -> Tensor:
    inverse = 1.0 / each
    if weight is not None:
        inverse = torch.where(weight > 0, inverse, 0.0)
    solved = row_scales(whole.ptr, inverse, squares, excess, whole.widest)
    return torch.where(everything, segment_largest(whole.ptr, inverse), solved)


def _highest(
    whole: WholeRows,
    found: Candidates,
    scale: Tensor,
    weight: Tensor | None,
    each: Tensor | None,
) -> Tensor:
    """Return max over the rows s of t of c_s, before any pass (`each` given) of c_s A_ts."""
    value = scale[whole.row_of]
    if weight is not None:
        value = value * (each if each is not None else (weight > 0).to(torch.float64))
    top = torch.zeros(found.ids.numel(), dtype=torch.float64, device=scale.device)
    return top.scatter_reduce_(0, found.numbers, value, "amax")


def _expected_new(top: Tensor, pi: Tensor, known: int) -> float:
    return float(torch.clamp(pi[known:] * top[known:], max=1.0).sum())


@dataclass(frozen=True, slots=True)
class _Chances:
    """Probability and random word by which each edge of a hop's whole rows is drawn."""

    pi: Tensor
    """pi_ts, float64, at most 1; 0 for an edge of weight 0."""
    words: Tensor
    everything: Tensor
    share_words: Tensor | None
    """Bits of thresholds [n], where all edges of a row have chance k / d and are compared as words.
    """


class DeviceLaborSampler(AbstractDeviceHops):
    """Samples by LABOR-0, LABOR-i or LABOR-*, Poisson or with exactly k neighbours.

    Arguments are `AbstractDeviceHops`'s and `LaborSampler`'s.
    """

    def __init__(
        self,
        topology: DeviceTopology,
        fanouts: Sequence[int],
        *,
        device: torch.device,
        variant: int | float | str = 0,
        form: str = Form.POISSON,
        estimator: Estimator = Estimator.HAJEK,
        edge_weight: NDArray[np.floating] | None = None,
        tolerance: float = 1e-4,
        dialect: Dialect = Dialect.EVERY_HOP,
        edge_ids: bool = False,
        **streams: Any,
    ) -> None:
        policy = StreamPolicy(purpose=Purpose.VERTEX, **streams)
        super().__init__(
            topology, fanouts, device=device, streams=policy, dialect=dialect, edge_ids=edge_ids
        )
        self.variant, self.form = check_variant(variant), check_form(form)
        self.estimator = Estimator(estimator)
        weight = check_edge_weight(edge_weight, topology.num_edges)
        self._weight = None if weight is None else copy_list(weight, device)
        self.tolerance = check_tolerance(tolerance)

    def _draw(self, rows: Tensor, known: list[Tensor], draws: HopDraws) -> Drawn:
        fanout = self.fanouts[draws.hop]
        uniform = self.variant == 0 and self._weight is None
        if uniform and (fanout < 0 or (self.form is Form.POISSON and draws.streams.plain)):
            drawn = scan_rows(self.topology, rows, fanout, draws.stream)
            drawn.weight = self._row_weights(rows, drawn.row_ptr, fanout)
            return drawn
        whole = whole_rows(self.topology, rows, draws.stream)
        weight = None
        if self._weight is not None:
            weight = self._weight[whole.positions].to(torch.float64)
        chances = self._chances(whole, weight, known, fanout, draws)
        kept = self._keep(whole, chances, fanout)
        counts = segment_counts(whole.ptr, kept)
        drawn = Drawn(row_ends(counts), whole.positions[kept], whole.values[kept])
        if uniform and draws.streams.plain:
            drawn.weight = self._row_weights(rows, drawn.row_ptr, fanout)
        elif self.estimator is not Estimator.PLAIN:
            drawn.weight = self._weights(whole, weight, chances.pi[kept], kept, drawn.row_ptr)
        return drawn

    def _chances(
        self,
        whole: WholeRows,
        weight: Tensor | None,
        known: list[Tensor],
        fanout: int,
        draws: HopDraws,
    ) -> _Chances:
        degrees, row_of = whole.rows.degrees, whole.row_of
        able = degrees if weight is None else segment_counts(whole.ptr, weight > 0)
        everything = torch.full_like(able, fanout < 0, dtype=torch.bool) | (able <= fanout)
        if self.variant == 0 and weight is None:
            share = fanout / degrees.clamp(min=1).to(torch.float64)
            pi = torch.where(everything, 1.0, share)[row_of]
            words = hop_words(draws.streams, draws.hop, whole.values)
            return _Chances(pi, words, everything, _share_words(fanout, degrees))
        found = Candidates.collect(whole, torch.cat(known), self.device)
        scale, each = _solve(self, whole, found, weight, everything, fanout)
        pi = torch.clamp(scale[row_of] * each, max=1.0)
        pi = torch.where(everything[row_of], 1.0, pi)
        if weight is not None:
            pi = torch.where(weight == 0, 0.0, pi)
        words = hop_words(draws.streams, draws.hop, found.ids)[found.numbers]
        return _Chances(pi, words, everything, None)

    def _keep(self, whole: WholeRows, chances: _Chances, fanout: int) -> Tensor:
        row_of, able = whole.row_of, chances.pi > 0
        everything = chances.everything[row_of]
        if self.form is Form.EXACT_K:
            if chances.share_words is not None:
                keys = (chances.words >> 1) & NEVER
            else:
                keys = (high_bits(chances.words).to(torch.float64) / chances.pi).view(torch.int64)
            wanted = torch.where(chances.everything, 0, max(fanout, 0))
            marks, _ = smallest(
                whole.ptr, row_of, torch.where(able, keys, NEVER), wanted, whole.widest
            )
            return able & (everything | marks)
        if chances.share_words is not None:
            below = (chances.words ^ LOWEST) < (chances.share_words ^ LOWEST)[row_of]
            return everything | below
        return unit(chances.words) < chances.pi

    def _row_weights(self, rows: Tensor, row_ptr: Tensor, fanout: int) -> Tensor | None:
        """Weigh edges that have one probability per row, as `choose.labor.weigh_rows`."""
        if self.estimator is Estimator.PLAIN:
            return None
        counts = row_ptr[1:] - row_ptr[:-1]
        if self.estimator is Estimator.HAJEK:
            same = 1.0 / counts.clamp(min=1).to(torch.float64)
        else:
            indptr = self.topology.indptr
            places = rows.to(indptr.device)
            degrees = (indptr[places + 1] - indptr[places]).to(self.device, torch.float64)
            share = torch.clamp(fanout / degrees.clamp(min=1), max=1.0) if fanout >= 0 else 1.0
            same = 1.0 / share / degrees.clamp(min=1)
        return same.to(torch.float32).repeat_interleave(counts)

    def _weights(
        self, whole: WholeRows, weight: Tensor | None, pi: Tensor, kept: Tensor, row_ptr: Tensor
    ) -> Tensor:
        row_of = whole.row_of[kept]
        values = 1.0 / pi if weight is None else weight[kept] / pi
        if self.estimator is Estimator.HAJEK:
            # The CPU's kernel rounds A / pi to float32 before it divides by their sum.
            sums = segment_sums(row_ptr, values)
            return (values.to(torch.float32).to(torch.float64) / sums[row_of]).to(torch.float32)
        if weight is None:
            total = whole.rows.degrees.to(torch.float64)
        else:
            total = segment_sums(whole.ptr, weight)
        return (values / total[row_of]).to(torch.float32)


def _share_words(fanout: int, degrees: Tensor) -> Tensor:
    """Compute `poisson.share_word` of each row as int64 bits; undefined for rows taken whole."""
    divisor = degrees.clamp(min=1)
    first = torch.full_like(divisor, max(fanout, 0) << 32)
    quotient = torch.div(first, divisor, rounding_mode="floor")
    rest = (first - quotient * divisor) << 32
    return (quotient << 32) | torch.div(rest, divisor, rounding_mode="floor")


@triton.jit(do_not_specialize=["base", "room", "above", "most"])
@no_type_check
def _scan_kernel(
    stream, indptr, places, base, nodes, before, known, flag, edges_before, edges, room, counts,
    turns, sums, values, ranks, stamp, row_places, edge_places, row_ptr, rows, positions, fanout,
    above, most, UNIT: tl.constexpr, BYTES: tl.constexpr, PLACES: tl.constexpr, DENSE: tl.constexpr,
    POSITIONS: tl.constexpr, WRITE: tl.constexpr, COPIES: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first, num_rows = rows_left(before, known, flag)
    source = tl.load(stream)
    if WRITE:
        lanes = tl.arange(0, CHUNKS)
        parts = tl.load(sums + lanes, mask=lanes < tl.cdiv(num_rows, CHUNK), other=0)
        begins = tl.cumsum(parts, axis=0) - parts
        earlier = tl.load(edges_before)
        free = room - earlier
        store_total(edges, flag, earlier, tl.sum(parts, axis=0), free)
        fresh = tl.load(stamp) * AGE + FRESH
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        asked = row < num_rows
        node = tl.load(nodes + first + row, mask=asked, other=0)
        start, degree, address = list_of(indptr, places, base, node, asked, PLACES, BYTES)
        mine = asked & (degree > above) & (degree <= most)
        degree = tl.where(mine, degree, 0)
        whole, threshold = share_of(degree, fanout)
        edge = tl.zeros((ROWS,), tl.int64)
        if WRITE:
            edge += tl.gather(begins, tl.where(mine, row // CHUNK, 0).to(tl.int32), axis=0)
            edge += tl.load(turns + row, mask=mine, other=0)
            for copy in range(COPIES):
                to = row_ptr + tl.load(row_places + copy) + first + row
                tl.store(to, earlier + edge, mask=mine)
        for begin in range(0, tl.max(degree, axis=0), COLUMNS):
            place = begin + tl.arange(0, COLUMNS).to(tl.int64)[None, :]
            value, kept = read_and_keep(
                source, address, place, degree, whole, threshold, UNIT, BYTES
            )
            if WRITE:
                to = edge[:, None] + tl.cumsum(kept.to(tl.int32), axis=1) - 1
                put_edges(
                    to, value, start[:, None] + place, first + row, kept & (to < free), fresh,
                    earlier, values, ranks, edge_places, rows, positions, DENSE, POSITIONS, COPIES,
                )  # fmt: skip
            edge += tl.sum(kept.to(tl.int64), axis=1)
        if not WRITE:
            tl.store(counts + row, edge, mask=mine)


@triton.jit(do_not_specialize=["base", "low", "high", "host_low", "host_high"])
@no_type_check
def _turn_kernel(
    indptr, places, base, low, high, host_low, host_high, nodes, before, known, flag, reads, counts,
    turns, sums, passes, PLACES: tl.constexpr, BYTES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first, num_rows = rows_left(before, known, flag)
    for chunk in range(tl.program_id(0), tl.cdiv(num_rows, CHUNK), tl.num_programs(0)):
        row = tl.arange(0, CHUNK).to(tl.int64) + chunk * CHUNK
        asked = row < num_rows
        count = tl.load(counts + row, mask=asked, other=0)
        tl.store(turns + row, tl.cumsum(count, axis=0) - count, mask=asked)
        tl.store(sums + chunk, tl.sum(count, axis=0))
        node = tl.load(nodes + first + row, mask=asked, other=0)
        _, degree, address = list_of(indptr, places, base, node, asked, PLACES, BYTES)
        count_reads(reads, address, asked, degree * passes, low, high, host_low, host_high)


def scan_edges(
    stream: Tensor,
    graph: DeviceTopology,
    fanout: int,
    hop: HopRows,
    edges: HopEdges,
    table: PaddedTable,
    into: BlockEdges,
) -> None:
    """Draw the edges of each row that LABOR-0 keeps, as `choose.scan_below`; -1 takes all.

    Arguments and overflow as in `choose.choose_edges`; launches `scan_launches` kernels.
    """
    device = hop.nodes.device
    chunk = chunk_of(hop.bound, hop.sums.numel(), row_tile(fanout))
    lists, asked = lists_of(graph), (hop.nodes, hop.before, hop.known, edges.flag)
    unit, places = kernel_unit(graph), graph.addresses is not None

    def scan(*, write: bool) -> None:
        for above, most, (tile, columns) in tiles(graph.widest):
            _scan_kernel[(programs_for(hop.bound, tile, device),)](
                stream, *lists, *asked, edges.before, edges.total, edges.room, hop.counts,
                hop.turns, hop.sums, edges.values, table.ranks, table.stamp, into.row_places,
                into.edge_places, into.row_ptr, into.rows,
                into.rows if into.positions is None else into.positions, fanout, above, most,
                **unit, PLACES=places, DENSE=table.keys is None,
                POSITIONS=into.positions is not None, WRITE=write, COPIES=into.row_places.numel(),
                CHUNKS=hop.sums.numel(), CHUNK=chunk, ROWS=tile, COLUMNS=columns,
            )  # fmt: skip

    scan(write=False)
    _turn_kernel[(programs_for(hop.bound, chunk, device),)](
        *lists, *graph.own, *graph.host, *asked, graph.counts, hop.counts, hop.turns, hop.sums,
        1 if fanout < 0 else SCANS, PLACES=places, BYTES=unit["BYTES"], CHUNK=chunk,
    )  # fmt: skip
    scan(write=True)


def scan_launches(graph: DeviceTopology) -> int:
    """Return how many kernels `scan_edges` launches."""
    return 1 + 2 * len(tiles(graph.widest))
