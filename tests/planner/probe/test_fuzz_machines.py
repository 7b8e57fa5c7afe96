"""Fuzzing of every file a machine comes from: NCCL, nvbandwidth, recorded NVML, machine.json."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gnnplan.planner.cost.link_use import link_rows
from gnnplan.planner.machine.model import load_machine, save_machine
from gnnplan.planner.probe.gpu.nvml import inventory
from gnnplan.planner.probe.imports import import_machine
from gnnplan.planner.probe.links import gpu_links, gpu_parts, gpu_switches, nvlink_covers
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.probe.topology import faults
from gnnplan.planner.report.topology import draw_topology
from gnnplan.runtime import codec
from tests.support.fuzzing import fuzzed, refused
from tests.support.mutations import damage, damaged, damaged_json
from tests.support.nvml_recording import load_replay

SITON = load_preset("siton")
RECORDINGS = Path(__file__).resolve().parents[2] / "golden" / "machines"
WORDS = ("", "-1", "999999999", "9" * 30, "x", "0000:zz:00.0", "ffff:ff:ff.f", "a&#10;b", "1e9")
RATES: dict[str, Any] = {
    "nvbandwidth": {
        "testcases": [
            {"name": name, "status": "Passed", "bandwidth_matrix": matrix}
            for name, matrix in (
                ("host_to_device_memcpy_ce", [[25.0] * 8]),
                ("host_to_all_memcpy_ce", [[12.0] * 8]),
                ("device_to_device_memcpy_read_sm", [[None] + ["48.1"] * 7] * 8),
            )
        ]
    }
}


def nccl_topology() -> str:
    """Four GPUs under two bridges of two NUMA nodes, joined in pairs."""

    def gpu(dev: int) -> str:
        peer = f'<nvlink target="0000:{16 + (dev ^ 1)}:00.0" count="12" tclass="0x030200"/>'
        return (
            f'<pci busid="0000:{16 + dev}:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" '
            f'link_width="16"><gpu dev="{dev}" sm="80">{peer}</gpu></pci>'
        )

    sides = [
        f'<cpu numaid="{n}" arch="x86_64"><pci busid="0000:0{n}:00.0" class="0x060400">'
        f"{gpu(2 * n)}{gpu(2 * n + 1)}</pci></cpu>"
        for n in range(2)
    ]
    return f'<?xml version="1.0" encoding="utf-8"?><system version="1">{"".join(sides)}</system>'


@st.composite
def damaged_xml(draw: st.DrawFn, text: str) -> bytes:
    """XML that stays well-formed: attributes changed, elements repeated; or damaged bytes."""
    if not draw(st.integers(0, 3)):
        return damage(draw, text.encode())
    for _ in range(draw(st.integers(1, 3))):
        act = draw(st.sampled_from(["value", "value", "value", "repeat", "deep", "encoding"]))
        if act == "value":
            start, end = draw(st.sampled_from([m.span(1) for m in re.finditer('="([^"]*)"', text)]))
            text = text[:start] + draw(st.sampled_from(WORDS)) + text[end:]
        elif act == "repeat":
            found = re.search(r"<nvlink[^>]*/>", text)
            text = text.replace(found[0], found[0] * 60, 1) if found else text
        elif act == "deep":
            text = text.replace("<gpu", "<pci>" * 80 + "<gpu", 1)
        else:
            word = draw(st.sampled_from(["none-such", "utf-16", "utf-7", "ascii"]))
            text = text.replace("utf-8", word)
    return text.encode()


def take(path: Path, content: bytes) -> str | None:
    """Import a file onto siton; what was taken can be drawn and kept."""
    path.write_bytes(content)
    found: list[Any] = []
    text = refused(lambda: found.append(import_machine(path, SITON)))
    for machine in found:
        draw_topology(machine, link_rows(machine, None))
        codec.dumps(machine)
    return text


@fuzzed(60)
@given(data=st.data())
def test_a_damaged_topology_of_nccl_is_refused_in_one_line(tmp_path: Path, data: st.DataObject):
    take(tmp_path / "topo.xml", data.draw(damaged_xml(nccl_topology())))


@fuzzed(120)
@given(data=st.data())
def test_damaged_rates_of_nvbandwidth_are_refused_in_one_line(tmp_path: Path, data: st.DataObject):
    whole = json.dumps(RATES).encode()
    take(tmp_path / "rates.json", data.draw(st.one_of(damaged_json(RATES), damaged(whole))))


@fuzzed(12)
@given(data=st.data())
@pytest.mark.parametrize("name", ["pcie-only", "bridged-pairs", "mig"])
def test_a_damaged_recording_of_nvml_is_refused_in_one_line(
    tmp_path: Path, name: str, data: st.DataObject
):
    whole = (RECORDINGS / f"{name}.json").read_bytes()
    path = tmp_path / "recording.json"
    path.write_bytes(data.draw(st.one_of(damaged_json(codec.parse(whole)), damaged(whole))))

    def read() -> None:
        replay = load_replay(path)
        found = inventory(replay, devices=replay.devices)
        if found is not None:
            faults(found)
            gpu_parts(found)
            gpu_links(found)
            gpu_switches(found)
            nvlink_covers(found)

    refused(read)


@fuzzed(16)
@given(data=st.data())
def test_a_damaged_machine_file_is_refused_in_one_line_or_usable(
    tmp_path: Path, data: st.DataObject
):
    path = tmp_path / "machine.json"
    name = data.draw(st.sampled_from(["siton", "cpu-2core"]))
    save_machine(load_preset(name), path)
    whole = path.read_bytes()
    document = codec.parse(whole)
    path.write_bytes(data.draw(st.one_of(damaged_json(document), damaged(whole))))
    found: list[Any] = []
    text = refused(lambda: found.append(load_machine(path)))
    for machine in found:
        assert text is None
        draw_topology(machine, link_rows(machine, None))
        machine.graph()
