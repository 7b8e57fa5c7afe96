"""The link between two hosts, as a machine of two ranks sees it.

python -m tests.benchmarks.prediction_link NODE ENDPOINT OUT.json

Two ranks on two hosts exchange rows and gradients over the network: the tables of collectives are
those that the probe measures between hosts, everything else is the machine's own.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from gnnplan.planner.machine.model import MachineModel, Table, load_machine, save_machine
from gnnplan.planner.probe.context import FULL
from gnnplan.planner.probe.hosts import HostTeam, Meeting, measure_hosts
from gnnplan.planner.probe.hosts_machine import join_hosts
from gnnplan.runtime import codec
from tests.benchmarks.prediction_cases import RATE_BITS_PER_SECOND
from tests.hosts import Hosts

PORT = 29510
BETWEEN = (
    "all_reduce",
    "all_to_all",
    "all_reduce_stepped",
    "all_to_all_stepped",
    "all_to_all_early",
    "all_to_all_after",
    "all_to_all_around_ids",
    "all_to_all_around_rows",
    "all_to_all_hidden",
    "all_to_all_asked",
)
"""Tables that the link replaces."""


def link_machine(machine: MachineModel, path: Path) -> MachineModel:
    """The machine with the collectives of a shaped link, measured once and kept in a file."""
    if path.exists():
        return load_machine(path)
    tables = path.with_suffix(".tables.json")
    with Hosts(["a", "b"], rate_bits_per_second=RATE_BITS_PER_SECOND) as hosts:
        endpoint = f"{hosts.address('a')}:{PORT}"
        words = [sys.executable, "-m", "tests.benchmarks.prediction_link"]
        started = [
            hosts.start(name, [*words, str(node), endpoint, str(tables)])
            for node, name in enumerate(("a", "b"))
        ]
        codes = [process.wait() for process in started]
    if any(codes):
        raise RuntimeError(f"expected both hosts to end well, found exit codes {codes}")
    measured = {
        name: codec.decode(Table, found) for name, found in json.loads(tables.read_text()).items()
    }
    kept = {name: table for name, table in machine.tables.items() if name not in BETWEEN}
    made = replace(machine, name=f"{machine.name} over 1 Gbit/s", tables=kept | measured)
    save_machine(made, path)
    return made


def main(arguments: list[str]) -> None:
    node, endpoint, out = arguments
    meeting = Meeting(node_rank=int(node), num_hosts=2, endpoint=endpoint, wait_seconds=120.0)
    with HostTeam(meeting, FULL) as team:
        rates = measure_hosts(team)
    if team.host == 0:
        joined = join_hosts([_nothing(), _nothing()], rates)
        named = {
            name: replace(table, axes=["ranks" if axis == "hosts" else axis for axis in table.axes])
            for name in BETWEEN
            for table in (joined.tables[f"hosts_{name}"],)
        }
        codec.write_text_atomically(Path(out), codec.dumps(named))


def _nothing() -> MachineModel:
    """A host of which only its links matter."""
    from gnnplan.planner.machine.model import Processor

    return MachineModel(
        name="host",
        fingerprint="",
        provenance="measured",
        processors=[Processor(name="cpu0", kind="cpu", memory="host0")],
        memories=[],
        links=[],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
