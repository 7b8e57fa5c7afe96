"""Location tables: for each rank, where to read the row of each vertex.

A code is `slot << 8 | source`. Sources are numbered alike for all ranks: own, the peers 0..G-1,
host, disk. Host and disk hold rows by id, so their slot is the id; own and peer slots index the
holder's `feature_own_ids_<g>`. The copy chosen is the one the evaluator charges for.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.placement import first_alike, mark_holders
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.location import (
    MAX_SOURCES,
    SOURCE_BITS,
    Codes,
    LocationTable,
    encode,
    renumber,
)
from gnnplan.runtime.plan.schema import Source
from gnnplan.runtime.process import side_by_side

MAX_DEVICES = MAX_SOURCES - 3
"""Most devices: own, host and disk take three of the source numbers."""


def sources(num_devices: int) -> list[Source]:
    """List the sources in the order of their numbers; too many devices raise ValueError."""
    if num_devices > MAX_DEVICES:
        raise ValueError(f"expected at most {MAX_DEVICES} devices, found {num_devices}")
    peers = [Source(kind="peer", rank=rank) for rank in range(num_devices)]
    return [Source(kind="own"), *peers, Source(kind="host"), Source(kind="disk")]


def build_locations(
    own: Sequence[NDArray[np.int64]],
    num_nodes: int,
    costs: RowCosts,
    *,
    cliques: Sequence[Sequence[int]] | None = None,
    on_host: NDArray[np.bool_] | None = None,
) -> list[Codes]:
    """Build the location codes of every rank, shape [N]; ranks with equal tables share one array.

    A row is read where it costs least: own, else a peer of the clique, else host, else disk. Equal
    costs of a peer go to the host; of several peers that hold a row the lowest rank is read.

    Args:
        own: ids each rank stores, by slot.
        num_nodes: N.
        costs: seconds per row.
        cliques: ranks that can read each other; None: all of them.
        on_host: whether a row is in host memory, shape [N]; None: all are.
    """
    num_devices = len(own)
    elsewhere = _elsewhere(num_nodes, num_devices, on_host)
    tables: list[Codes] = [elsewhere] * num_devices
    firsts = first_alike(list(own))
    for clique in [range(num_devices)] if cliques is None else cliques:
        clique_table = _with_peers(elsewhere, own, clique, num_devices, costs, on_host)
        for position, g in enumerate(clique):
            same = [h for h in clique[:position] if firsts[h] == firsts[g]]
            tables[g] = tables[same[0]] if same else _with_own(clique_table, own[g])
    return [tables[first] for first in first_alike(tables)]


def build_list_locations(
    own: Sequence[NDArray[np.int64]], num_nodes: int, cliques: Sequence[Sequence[int]]
) -> list[Codes]:
    """Build the codes of adjacency lists, `own` those each rank keeps; the others lie on the host.

    Ranks of a clique read each other's. Sources are numbered as `TopologyPlacement` says: own,
    host, disk, then ranks. PlanError: a code does not address the list it stands for.
    """
    num, places = len(own), RowCosts(local=0.0, peer=1.0, host=2.0)
    tables = build_locations(own, num_nodes, places, cliques=cliques)
    check_locations(tables, own, num_nodes)
    numbers = np.zeros(MAX_SOURCES, np.int64)
    numbers[1 : 1 + num] = 3 + np.arange(num)
    numbers[1 + num : 3 + num] = 1, 2
    for codes in {id(table): table for table in tables}.values():
        renumber(codes, numbers)
    return tables


def _elsewhere(num_nodes: int, num_devices: int, on_host: NDArray[np.bool_] | None) -> Codes:
    """Code rows that no device holds: by id, on the host or on disk."""
    host, disk = np.uint8(num_devices + 1), np.uint8(num_devices + 2)
    numbers = np.full(num_nodes, host) if on_host is None else np.where(on_host, host, disk)
    return encode(numbers, np.arange(num_nodes))


def _with_peers(
    elsewhere: Codes,
    own: Sequence[NDArray[np.int64]],
    clique: Sequence[int],
    num_devices: int,
    costs: RowCosts,
    on_host: NDArray[np.bool_] | None,
) -> Codes:
    """Code a clique's rows as if every held one were read from its lowest holder."""
    beats_host, beats_disk = costs.peer < costs.host, costs.peer < costs.disk
    if num_devices == 1 or not (beats_host or (beats_disk and on_host is not None)):
        return elsewhere
    codes = elsewhere.copy()
    for g in sorted(clique, reverse=True):  # the lowest rank writes last
        slots = np.arange(len(own[g]), dtype=codes.dtype)
        ids = own[g]
        if on_host is not None:
            pays = np.where(on_host[ids], beats_host, beats_disk)
            ids, slots = ids[pays], slots[pays]
        codes[ids] = (slots << SOURCE_BITS) | (1 + g)
    return codes


def _with_own(clique_table: Codes, own: NDArray[np.int64]) -> Codes:
    codes = clique_table.copy()
    codes[own] = np.arange(len(own), dtype=codes.dtype) << SOURCE_BITS  # source 0: own
    return codes


def check_locations(
    tables: Sequence[Codes], own: Sequence[NDArray[np.int64]], num_nodes: int
) -> None:
    """Check that every code addresses a row whose stored id is the vertex it stands for.

    Two vertices can then not share a slot, and no row is stored twice by one rank. PlanError names
    the rank, the vertex and what its code points at.
    """
    named = sources(len(own))
    own_ids = dict(enumerate(own))
    try:
        mark_holders(own, num_nodes)
    except ValueError as error:
        raise PlanError(f"own rows: {error}; plan again") from None
    distinct: dict[tuple[int, int], int] = {}
    for rank, codes in enumerate(tables):
        distinct.setdefault((id(codes), id(own[rank])), rank)

    def check(rank: int) -> None:
        codes = tables[rank]
        if codes.shape != (num_nodes,):
            raise PlanError(f"rank {rank}: expected {num_nodes} codes, found shape {codes.shape}")
        LocationTable(codes, named).check(own_ids, rank)

    side_by_side(check, sorted(distinct.values()), items=num_nodes)
