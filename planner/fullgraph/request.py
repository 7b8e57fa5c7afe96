"""What a timing process is asked about one part, and what it answers."""

from dataclasses import dataclass, field

from runtime.plan import FullGraph, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Settings to time."""

    settings: FullGraph
    draws_only: bool = False
    """Time the epoch's draws and nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRequest:
    """One part of a graph under one model."""

    workload: Workload
    graph_path: str
    fingerprint: str = ""
    """Of the graph that must lie there; empty: any."""
    partition_path: str
    """int32 .npy: part of each node."""
    wanted_path: str
    """int64 .npy: nodes that other parts need of this one, by receiver."""
    wanted_counts: list[int]
    rank: int
    size: int
    in_dim: int
    num_classes: int
    task: str
    threads: int
    cases: list[Case]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseSeconds:
    """One rank's seconds per epoch under one case; nothing is waited for."""

    sample: float
    """Drawing boundary nodes and cutting the blocks to them."""
    forward_backward: float
    packing: float
    """Copying the rows to send, on the training thread."""
    windows: list[float]
    """Work between the start of each exchange and the need for its rows, in order."""
    spread: float
    """Relative half-width of the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartAnswer:
    """What one process measured on its part."""

    cases: list[CaseSeconds]
    optimizer_seconds: float
    num_parameters: int
    widths: list[int] = field(default_factory=list[int])
    """d_0 .. d_L: columns of what each layer exchanges, then of the outputs."""
