"""Machine files whose parts do not fit together are refused; every preset passes."""

from dataclasses import replace

import pytest

from planner.errors import MachineError
from planner.machine import MachineModel, load_machine, save_machine
from planner.machine_check import check_machine
from planner.probe.presets import list_presets, load_preset


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
