"""A machine written down by hand, with round rates, for tests that need no probe."""

from gnnplan.planner.machine.model import Link, MachineModel, Memory, Processor, Table

GIB = 2**30


def constant(unit: str, axes: list[str], value: float, spread: float = 0.05) -> Table:
    """A table with one value everywhere."""
    return Table(
        unit=unit,
        axes=axes,
        points=[[1.0] for _ in axes],
        values=[value],
        spread=spread,
    )


GATHER_AXES = ["row_bytes", "working_set_bytes", "readers"]


def machine(
    *,
    cores: int = 2,
    host_bytes: int = 8 * GIB,
    own_row: float = 100e-9,
    mapped_row: float = 110e-9,
    noise: float = 0.03,
) -> MachineModel:
    """Two cores, 8 GiB: 10 ns per edge, 50 ns per vertex, 100 and 110 ns per row."""
    return MachineModel(
        name="by-hand",
        fingerprint="0" * 32,
        provenance="preset",
        processors=[Processor(name="cpu0", kind="cpu", memory="host0", cores=cores)],
        memories=[
            Memory(name="host0", kind="host", capacity_bytes=host_bytes),
            Memory(name="disk0", kind="disk", capacity_bytes=100 * GIB),
        ],
        links=[
            Link(
                name="memory0.read",
                source="host0",
                target="cpu0",
                latency_seconds=1e-7,
                bandwidth_bytes_per_second=10e9,
            ),
            Link(
                name="disk0.read",
                source="disk0",
                target="host0",
                latency_seconds=1e-4,
                bandwidth_bytes_per_second=1e9,
            ),
            Link(
                name="gloo0",
                source="host0",
                target="host0",
                latency_seconds=1e-4,
                bandwidth_bytes_per_second=1e9,
            ),
        ],
        tables={
            "copy": constant("bytes_per_second", ["readers"], 5e9),
            "gather": constant("seconds_per_row", GATHER_AXES, own_row),
            "mapped_gather": constant("seconds_per_row", GATHER_AXES, mapped_row),
            "disk_read": constant("seconds_per_read", ["read_bytes", "queue_depth"], 10e-6),
            "all_reduce": constant("seconds", ["bytes", "ranks"], 2e-3),
            "all_to_all": constant("seconds", ["bytes", "ranks"], 1e-3),
            "sample_edge": constant("seconds_per_edge", ["topology_bytes", "readers"], 10e-9),
            "sample_vertex": constant("seconds_per_vertex", ["table_bytes", "readers"], 50e-9),
            "beside": constant("ratio", ["ranks"], 1.25),
            "beside_loader": constant("ratio", ["ranks"], 1.5),
        },
        noise=noise,
    )
