"""Machine files whose parts do not fit together are refused; every preset passes."""

from dataclasses import replace

import pytest

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import (
    MachineModel,
    check_machine,
    first_hosts,
    load_machine,
    one_host,
    save_machine,
)
from gnnplan.planner.probe.presets import list_presets, load_preset
from tests.support.joined import hosts_machine


@pytest.mark.parametrize("name", [*list_presets(), "perlmutter:3"])
def test_presets_pass(name: str):
    check_machine(load_preset(name))


def changed(machine: MachineModel, what: str) -> MachineModel:
    processor, memory, link = machine.gpus[0], machine.memories[0], machine.links[0]
    rest = {
        "processors": [p for p in machine.processors if p is not processor],
        "memories": machine.memories[1:],
        "links": machine.links[1:],
    }
    new = {
        "no processor": {"processors": []},
        "a memory that is not there": {
            "processors": [*rest["processors"], replace(processor, memory="nowhere")]
        },
        "no cores": {"processors": [*rest["processors"], replace(processor, cores=0)]},
        "two of a name": {"memories": [*machine.memories, memory]},
        "no capacity": {"memories": [replace(memory, capacity_bytes=0), *rest["memories"]]},
        "a link to nowhere": {"links": [*rest["links"], replace(link, target="nowhere")]},
        "no bandwidth": {"links": [*rest["links"], replace(link, bandwidth_bytes_per_second=0.0)]},
        "a negative latency": {"links": [*rest["links"], replace(link, latency_seconds=-1.0)]},
        "a clique of others": {"cliques": [["gpu0", "gpu99"]]},
        "a clique with one twice": {"cliques": [["gpu0", "gpu0"]]},
        "no noise": {"noise": -0.1},
    }
    return replace(machine, **new[what])


@pytest.mark.parametrize(
    "what",
    [
        "no processor",
        "a memory that is not there",
        "no cores",
        "two of a name",
        "no capacity",
        "a link to nowhere",
        "no bandwidth",
        "a negative latency",
        "a clique of others",
        "a clique with one twice",
        "no noise",
    ],
)
def test_parts_that_do_not_fit_are_refused_when_the_file_is_read(tmp_path, what: str):
    path = tmp_path / "machine.json"
    save_machine(changed(load_preset("siton"), what), path)
    with pytest.raises(MachineError, match=r"machine\.json: .*expected"):
        load_machine(path)


def test_a_card_is_a_part_of_one_host_whatever_it_is_called():
    machine = hosts_machine(3)
    cards = [s.name for s in machine.switches if s.kind == "card"]
    assert cards == ["nic0", "nic1", "nic2"]
    renamed = replace(
        machine,
        switches=[replace(s, name=s.name.replace("nic", "mlx")) for s in machine.switches],
        links=[
            replace(x, source=x.source.replace("nic", "mlx"), target=x.target.replace("nic", "mlx"))
            for x in machine.links
        ],
    )
    for found, name in ((machine, "nic"), (renamed, "mlx")):
        check_machine(found)
        two = first_hosts(found, 2)
        check_machine(two)
        assert [s.name for s in two.switches if s.kind == "card"] == [f"{name}0", f"{name}1"]
        assert not [s for s in one_host(found, 1).switches if s.kind == "card"]
    with pytest.raises(MachineError, match="found 'nic0'"):
        check_machine(replace(machine, switches=[]))
    astray = [replace(x, target="host0") if x.source == "nic1" else x for x in machine.links]
    with pytest.raises(MachineError, match="card 'nic1': expected links to and from one memory"):
        check_machine(replace(machine, links=astray))
