"""What emulated GPUs are planned to do and do: one line adds a mode.

A mode plans with some settings, takes the cheapest candidate that it wants, and says what must hold
of the plan. `test_modes.py` trains under it, beside CPU ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gnnplan.planner.candidate import Candidate, columns_of
from gnnplan.planner.placement.owned import OWNED
from gnnplan.runtime.plan.schema import Links, Plan, StepShapes, Strategy

ONE, HOST, HOSTS = "1 GPU", "n GPUs, one host", "n GPUs, several hosts"
COLUMNS = (ONE, HOST, HOSTS)
ROWS = {
    "probe": "probe, plan from a probe",
    "independent": "independent batches, validation, test, checkpoint, resume",
    "rows": "rows: own, host, peers mapped, peers exchanged, another host, disk",
    "topology": "topology: host, replicated, hot lists cached, read from peers of the clique",
    "legion": "Legion whole: partition draws the seeds, hotness by clique, one budget for lists "
    "and rows",
    "samplers": "LABOR, LADIES, PLADIES, FastGCN, LAS, dependent batches with self-filling caches",
    "cooperative": "cooperative batches, owners by hash or partition, also mixed precision",
    "bulk": "bulk sampling, 1.5D with any c, features by all-to-allv in process columns",
    "full graph": "full-graph BNS with p, DropEdge, BES, slices",
    "links and types": "links, typed graphs, sampled on the GPU",
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to train on emulated GPUs."""

    name: str
    row: str
    """Of `ROWS`."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `PlanSettings`; `workload` holds changes of the workload's."""
    graph: Literal["nodes", "links", "typed", "halves", "sparse", "weights"] = "nodes"
    """What is trained on: nodes of one type, links, nodes of a graph with tables by type, nodes
    whose rows are stored in bfloat16 or sparse, or nodes of a graph whose edges have weights."""
    devices: int = 2
    hosts: int = 1
    recording: str | None = None
    """Box of tests/golden/machines that is probed for the machine; None: one of made-up rates."""
    room_rows: int | None = None
    """Rows that each GPU has room for beside all else; None: its whole memory."""
    host_rows: int | None = None
    """Rows that the host has room for beside all else; None: its whole memory."""
    changed_rows: int = 0
    """Rows that each GPU has room for beside its plan, where `change` takes memory besides."""
    wants: Callable[[Candidate], bool] = lambda candidate: True
    change: Callable[[Strategy], Strategy] = lambda strategy: strategy
    """Of the planned strategy, where a choice has no setting."""
    holds: Callable[[Plan, dict[str, int]], bool] = lambda plan, rows: True
    """What must be so of the plan, and of the rows that were read by source."""
    keeps_lists: tuple[str, ...] = ()
    """Where lists are read, if GPUs keep hot ones; the counts must be those simulated."""
    quick: bool = False
    """Whether `make test` runs it."""
    tolerance: float = 1e-5
    """Of a loss, relative: a GPU's kernels take sums in another order."""
    score_tolerance: float = 0.02
    """Of a score: a prediction that is nearly even may fall either way."""

    @property
    def column(self) -> str:
        """Where it runs."""
        return HOSTS if self.hosts > 1 else (ONE if self.devices == 1 else HOST)

    @property
    def label(self) -> str:
        """What tells it from every other mode."""
        return f"{self.row}: {self.name}, {self.devices} on {self.hosts}"


def _topology(policy: str) -> Callable[[Candidate], bool]:
    return lambda candidate: candidate.topology.policy == policy


def _reads(*kinds: str) -> Callable[[Plan, dict[str, int]], bool]:
    """Rows came from these sources and no others."""
    return lambda plan, rows: {kind for kind, count in rows.items() if count} == set(kinds)


def _shares(*kinds: str) -> Callable[[Plan, dict[str, int]], bool]:
    """Ranks share a batch, as asked for, and read these sources and no others."""
    reads = _reads(*kinds)
    return lambda plan, rows: plan.strategy.batching == "cooperative" and reads(plan, rows)


def _exchanges(strategy: Strategy) -> Strategy:
    return replace(strategy, features=replace(strategy.features, peer_way="exchange"))


def _keeps_none(candidate: Candidate) -> bool:
    return candidate.policy == "none"


def _keeps_owned(candidate: Candidate) -> bool:
    return candidate.policy == OWNED


def _exchanges_ahead(strategy: Strategy) -> Strategy:
    """Exchange rows beside compute, and gradients in parts."""
    return replace(_exchanges(strategy), threads=replace(strategy.threads, comm=1))


def _ahead(candidate: Candidate) -> bool:
    return candidate.threads.sample > 0


def _in_line(candidate: Candidate) -> bool:
    return candidate.threads.sample == 0


def _captures(
    rows: list[int], edges: list[int], *, drawn: bool = True
) -> Callable[[Strategy], Strategy]:
    """Replay the step over these shapes, into which batches are drawn beside it, or copied."""
    shapes = StepShapes(rows=rows, edges=edges, drawn=drawn, ahead=int(drawn))
    return lambda strategy: replace(
        strategy, step="captured", shapes=shapes, threads=replace(strategy.threads, comm=0)
    )


def _copies(strategy: Strategy) -> Strategy:
    """Replay the step over shapes into which batches are copied."""
    return _captures([33, 129, 241], [96, 288], drawn=False)(strategy)


def _copies_exchanged(strategy: Strategy) -> Strategy:
    return _copies(_exchanges(strategy))


def _stacked(candidate: Candidate) -> bool:
    return candidate.bulk_batches > 1 and candidate.topology.policy != "partitioned"


def _grid(bulk: int) -> Callable[[Candidate], bool]:
    """Stacks of so many steps; a whole epoch where it has fewer."""
    return lambda candidate: (
        candidate.topology.policy == "partitioned" and (candidate.bulk_batches > 1) == (bulk > 1)
    )


def _by_columns(candidate: Candidate) -> bool:
    return _grid(8)(candidate) and candidate.cliques == columns_of(candidate)


def _in_parts(plan: Plan, rows: dict[str, int]) -> bool:
    del rows
    return plan.strategy.topology.policy == "partitioned"


def _together(candidate: Candidate) -> bool:
    return len(candidate.cliques) == 1


def _prefers_local(candidate: Candidate) -> bool:
    return candidate.las is not None


def _depends(candidate: Candidate) -> bool:
    return (candidate.kappa or 1) > 1


def _crosses(plan: Plan, rows: dict[str, int]) -> bool:
    """Boundary rows are exchanged, where there are several ranks."""
    return plan.strategy.mode == "full-graph" and (rows["halo"] > 0) == (plan.num_ranks > 1)


EACH_EPOCH = {"first_layer": "each-epoch"}
HALF = {**EACH_EPOCH, "keep": 0.5}
UNBIASED = {"allow": "unbiased"}
BOUNDARIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("whole boundary", EACH_EPOCH, {}),
    ("p", {**HALF, "rounding": "stochastic"}, UNBIASED),
    ("one draw for all layers", {**HALF, "draws": "shared"}, UNBIASED),
    ("DropEdge", {"keep": 0.5, "drop": "edges"}, UNBIASED),
    ("BES", {**HALF, "drop": "boundary-edges"}, UNBIASED),
    ("slices", {**EACH_EPOCH, "exchange": "broadcast"}, {}),
    ("first layer once", {"first_layer": "once"}, {}),
    ("gcn", HALF, {"model": "gcn", **UNBIASED}),
    ("gat", HALF, {"model": "gat", "heads": 2, "allow": "approximate"}),
]
"""Names, settings and workloads of full-graph modes."""
ANY = {"allow": "approximate"}
SIZES = {"sampler_parameters": {"sizes": "40,30"}, "dialect": "every_hop", "workload": ANY}
SHARED: list[tuple[str, dict[str, Any], float]] = [
    ("first seen", {}, 1e-5),
    ("every hop", {"dialect": "every_hop"}, 1e-5),
    ("gcn", {"workload": {"model": "gcn"}}, 1e-5),
    ("gat", {"workload": {"model": "gat", "heads": 2}}, 1e-5),
    ("labor", {"sampler": "labor", "workload": ANY}, 1e-5),
    ("bfloat16", {"workload": {"precision": "bfloat16"}}, 1e-2),
]
"""Names, settings and tolerances of modes that `--batching cooperative` asks for."""
LISTS = [
    ("hot lists cached", "cached", 1, 1, ("own", "host")),
    ("hot lists cached", "cached", 2, 1, ("own", "host")),
    ("hot lists cached", "cached", 4, 2, ("own", "host")),
    ("read from peers of the clique", "clique", 2, 1, ("own", "peer", "host")),
    ("read from peers of the clique", "clique", 4, 2, ("own", "peer", "host")),
]
"""Names, topologies, GPUs and hosts of modes that keep lists, and where lists are read."""
WHOLE: list[tuple[str, int, dict[str, Any], Callable[[Candidate], bool], tuple[str, ...]]] = [
    ("one budget", 1, {}, _in_line, ("own", "host")),
    ("one clique", 2, {}, _together, ("own", "peer", "host")),
    ("two cliques", 4, {}, _in_line, ("own", "peer", "host")),
    ("two cliques, ahead", 4, {}, _ahead, ("own", "peer", "host")),
]
"""Names, GPUs, workloads and candidates of Legion's modes, and where lists and rows are read."""
GRIDS: list[tuple[str, dict[str, Any], int, int, int, int]] = [
    ("", {}, 1, 8, 2, 1),
    ("", {}, 2, 8, 4, 1),
    (" ladies", {"sampler": "ladies", **SIZES}, 2, 8, 4, 1),
    ("", {}, 1, 8, 4, 2),
    ("", {}, 2, 8, 4, 2),
]
"""Words, settings, copies, batches of a stack, GPUs and hosts where lists are in parts."""
WEIGHTS: dict[str, Any] = {"sampler_parameters": {"weights": "graph"}, "workload": ANY}
LAYER_WEIGHTS = SIZES | {"sampler_parameters": {"sizes": "40,30", "weights": "graph"}}
WEIGHTED: list[tuple[str, str, dict[str, Any], Callable[[Candidate], bool], int, int]] = [
    ("bulk", "stacks of ladies", {"sampler": "ladies", **LAYER_WEIGHTS}, _stacked, 1, 1),
    *(
        ("bulk", f"1.5D {name} (c = {copies})",
         {"sampler": name, "replication": copies, **LAYER_WEIGHTS}, _grid(8), devices, hosts)
        for name, copies, devices, hosts in (
            ("ladies", 1, 2, 1), ("pladies", 2, 4, 1), ("fastgcn", 2, 4, 2),
        )
    ),
    *(
        ("cooperative", name, {"sampler": name, "batching": "cooperative", **WEIGHTS},
         _keeps_none, 2, 1)
        for name in ("neighbor", "labor")
    ),
    *(
        ("samplers", f"dependent {name} in lru", {"sampler": name, "policy": "lru", **each},
         _depends, 1, 1)
        for name, each in (("labor", WEIGHTS), ("ladies", LAYER_WEIGHTS))
    ),
    ("samplers", "neighbor", {"sampler": "neighbor", **WEIGHTS}, _ahead, 2, 1),
]  # fmt: skip
"""Rows, names, settings, candidates, GPUs and hosts of modes that draw by the graph's weights."""
LARGER = {"batch_size": 64, "fanouts": [6, 4]}
"""Batches that take more memory than an evaluation does."""
TASKS: dict[Any, dict[str, Any]] = {
    "links": {"workload": {"links": Links(eval_negatives=10)}},
    "typed": {"workload": {"model": "rgcn", "type_fanouts": {"author__writes__paper": [-1, 1]}}},
}
"""Settings of graphs that are not of nodes of one type."""
MODES = [
    *(
        Mode(
            name=name, row="probe", recording=recording, devices=devices, hosts=hosts,
            settings={"policy": policy}, room_rows=60, holds=_reads(*kinds),
            quick=devices == 1,
        )
        for name, recording, devices, hosts, policy, kinds in (
            ("a recorded H200, of a law's seconds", "h200-virtual-machine", 1, 1, "degree",
             ("own", "host")),
            ("four GPUs in pairs", "bridged-pairs", 4, 1, "legion", ("own", "peer", "host")),
            ("two hosts probed together, a pair on each", "bridged-pairs", 4, 2, "legion",
             ("own", "peer", "host")),
        )
    ),
    Mode(name="in line", row="independent", devices=1, wants=_in_line),
    Mode(name="ahead", row="independent", devices=1, wants=_ahead, quick=True),
    Mode(name="in line", row="independent", wants=_in_line),
    Mode(name="ahead", row="independent", wants=_ahead),
    Mode(name="four GPUs", row="independent", devices=4, wants=_ahead),
    Mode(name="two hosts", row="independent", devices=4, hosts=2),
    Mode(name="gcn", row="independent", settings={"workload": {"model": "gcn"}}),
    Mode(name="gat", row="independent", settings={"workload": {"model": "gat", "heads": 2}}),
    Mode(name="dropout", row="independent", settings={"workload": {"dropout": 0.3}}),
    Mode(name="captured", row="independent", devices=1, wants=_in_line,
         change=_captures([33, 129, 241], [96, 288])),
    Mode(name="captured, some overflow", row="independent",
         change=_captures([17, 65, 116], [48, 144])),
    Mode(name="captured gcn", row="independent", settings={"workload": {"model": "gcn"}},
         change=_captures([17, 65, 241], [48, 144])),
    Mode(name="bfloat16", row="independent", settings={"workload": {"precision": "bfloat16"}},
         tolerance=1e-2, score_tolerance=0.1),
    Mode(name="bfloat16 rows", row="independent", graph="halves",
         settings={"workload": {"precision": "bfloat16"}}, tolerance=1e-2, score_tolerance=0.1),
    *(
        Mode(
            name=name, row="rows", devices=devices, settings=settings, room_rows=rows,
            holds=_reads(*kinds),
        )
        for name, settings, rows, kinds in (
            ("host", {"policy": "none"}, None, ("host",)),
            ("own", {"policy": "degree"}, None, ("own",)),
            ("disk", {"policy": "degree", "shared_host": False}, 60, ("own", "disk")),
        )
        for devices in (1, 2)
    ),
    Mode(name="sparse", row="rows", graph="sparse", wants=_ahead, holds=_reads("host")),
    Mode(
        name="peers mapped", row="rows", quick=True, settings={"policy": "legion"}, room_rows=60,
        wants=_together, holds=_reads("own", "peer", "host"),
    ),
    Mode(
        name="peers exchanged", row="rows", settings={"policy": "legion"}, room_rows=60,
        wants=_together, change=_exchanges, holds=_reads("own", "peer", "host"),
    ),
    *(
        Mode(
            name=name, row="rows", settings={"policy": "legion"}, room_rows=60, changed_rows=1500,
            wants=lambda candidate: _together(candidate) and _ahead(candidate),
            change=change, holds=_reads("own", "peer", "host"),
        )
        for name, change in (
            ("captured, peers exchanged ahead", _copies_exchanged),
            ("captured, peers mapped ahead", _copies),
        )
    ),
    Mode(
        name="two cliques", row="rows", devices=4, settings={"policy": "legion"}, room_rows=60,
        holds=_reads("own", "peer", "host"),
    ),
    Mode(
        name="peers exchanged ahead", row="rows", settings={"policy": "legion", "workload": LARGER},
        room_rows=150, wants=_ahead, change=_exchanges_ahead, holds=_reads("own", "peer"),
    ),
    Mode(
        name="two hosts", row="rows", devices=4, hosts=2, settings={"policy": "song-jiang"},
        room_rows=60,
    ),
    *(
        Mode(
            name=lists, row="topology", devices=devices, hosts=hosts, wants=_topology(lists),
            quick=(lists, devices) == ("replicated", 2),
        )
        for lists in ("host", "replicated")
        for devices, hosts in ((1, 1), (2, 1), (4, 2))
    ),
    *(
        Mode(
            name=name, row="topology", devices=devices, hosts=hosts,
            settings={"topology": lists, "policy": "degree"}, room_rows=30,
            wants=_topology("cached"), keeps_lists=kinds,
            holds=_reads("own", "host"),
        )
        for name, lists, devices, hosts, kinds in LISTS
    ),
    *(
        Mode(
            name=name, row="legion", devices=devices,
            settings={"topology": "clique", "policy": "legion", "workload": changes}, room_rows=60,
            wants=wants, holds=_reads(*kinds), keeps_lists=kinds, quick=name == "one clique",
        )
        for name, devices, changes, wants, kinds in WHOLE
    ),
    *(
        Mode(
            name=name, row="samplers", devices=devices, hosts=hosts,
            settings={"sampler": name, **settings},
        )
        for name, settings in (
            ("labor", {"workload": ANY}), ("ladies", SIZES), ("pladies", SIZES),
            ("fastgcn", SIZES),
        )
        for devices, hosts in ((1, 1), (2, 1), (4, 2))
    ),
    Mode(
        name="las", row="samplers", settings={"policy": "degree", "workload": ANY}, room_rows=150,
        wants=_prefers_local, holds=_reads("own", "host"),
    ),
    Mode(
        name="las with legion", row="samplers", settings={"policy": "legion", "workload": ANY},
        room_rows=150, wants=_prefers_local,
    ),
    Mode(
        name="las", row="samplers", settings={"policy": "degree", "workload": ANY}, devices=4,
        hosts=2, room_rows=150, wants=_prefers_local,
        holds=_reads("own", "host"),
    ),
    Mode(
        name="lru", row="samplers", settings={"policy": "lru"}, room_rows=150, quick=True,
        holds=_reads("cache", "host"),
    ),
    Mode(
        name="clock and disk", row="samplers", settings={"policy": "clock"}, room_rows=150,
        host_rows=200, holds=_reads("cache", "host", "disk"),
    ),
    *(
        Mode(
            name="dependent batches in lru", row="samplers", devices=devices, hosts=hosts,
            settings={"sampler": "labor", "policy": "lru", "workload": ANY}, room_rows=150,
            wants=_depends, holds=_reads("cache", "host"),
        )
        for devices, hosts in ((1, 1), (2, 1), (4, 2))
    ),
    *(
        Mode(
            name=name, row="cooperative", devices=devices, hosts=hosts,
            settings={"batching": "cooperative", **settings}, wants=_keeps_none,
            holds=_shares("host"), quick=name == "first seen" and devices == 2,
            tolerance=tolerance,
        )
        for name, settings, tolerance in SHARED
        for devices, hosts in ((2, 1), (4, 2))
    ),
    Mode(
        name="own rows", row="cooperative", settings={"batching": "cooperative"}, room_rows=60,
        wants=_keeps_owned, holds=_shares("own", "host"),
    ),
    *(
        Mode(
            name="owners by parts", row="cooperative", devices=devices, hosts=hosts,
            settings={"batching": "cooperative", "owner": "partition"}, wants=_keeps_none,
            holds=_shares("host"),
        )
        for devices, hosts in ((2, 1), (4, 2))
    ),
    *(
        Mode(
            name="stacks", row="bulk", devices=devices, hosts=hosts, wants=_stacked,
            holds=lambda plan, rows: plan.strategy.bulk_batches > 1, quick=devices == 1,
        )
        for devices, hosts in ((1, 1), (2, 1), (4, 2))
    ),
    *(
        Mode(
            name=f"1.5D{words} (c = {copies})", row="bulk", devices=devices, hosts=hosts,
            settings={"replication": copies, **settings}, wants=_grid(bulk), holds=_in_parts,
            quick=(words, devices) == ("", 2),
        )
        for words, settings, copies, bulk, devices, hosts in GRIDS
    ),
    *(
        Mode(
            name=f"{name} by weights", row=row, graph="weights", devices=devices, hosts=hosts,
            settings=settings, wants=wants, room_rows=150 if wants is _depends else None,
        )
        for row, name, settings, wants, devices, hosts in WEIGHTED
    ),
    *(
        Mode(
            name=f"1.5D rows in columns (c = {copies})", row="bulk", devices=4, hosts=hosts,
            settings={"replication": copies, "policy": "legion"}, room_rows=60, host_rows=150,
            changed_rows=500, wants=_by_columns, change=_exchanges,
            holds=lambda plan, rows: _in_parts(plan, rows) and rows["peer"] > 0,
        )
        for copies, hosts in ((1, 1), (2, 2))
    ),
    *(
        Mode(
            name=name, row="full graph", devices=devices, hosts=hosts, holds=_crosses,
            settings={
                "mode": "full-graph", "workload": {"fanouts": [-1, -1], **work}, **choices,
            },
            quick=name == "p" and devices == 2,
        )
        for name, choices, work in BOUNDARIES
        for devices, hosts in ((1, 1), (2, 1), (4, 2))
        if devices > 1 or name in ("DropEdge", "first layer once", "gcn", "gat")
    ),
    *(
        Mode(
            name=f"{graph}{more}", row="links and types", graph=graph, devices=devices, hosts=hosts,
            settings=settings | {"policy": policy}, room_rows=rows,
            holds=_reads(*kinds), quick=(graph, devices, policy) == ("typed", 1, "degree"),
        )
        for graph, settings in TASKS.items()
        for devices, hosts, policy, rows, kinds, more in (
            (1, 1, "degree", 60, ("own", "host"), ""),
            (2, 1, "none", None, ("host",), " on the host"),
            (2, 1, "legion", 60, ("own", "peer", "host"), " and peers"),
            (4, 2, "degree", 60, ("own", "host"), ""),
        )
    ),
    Mode(
        name="negatives of the batch", row="links and types", graph="links", wants=_ahead,
        settings={
            "workload": {
                "links": Links(negatives="in-batch", num_negatives=3, exclude="forward",
                               eval_negatives=10),
            },
            "dialect": "every_hop",
        },
    ),
    Mode(
        name="typed and lru", row="links and types", graph="typed", room_rows=150,
        settings=TASKS["typed"] | {"policy": "lru", "dialect": "every_hop"},
        holds=_reads("cache", "host"),
    ),
]  # fmt: skip
"""Every mode that is planned and run; its mark in README's table is E."""
