"""`machine import`: NCCL topologies and nvbandwidth's rates; bad files are one line and code 2."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import MachineModel, load_machine
from gnnplan.planner.machine.routes import Reader, routes, row_seconds
from gnnplan.planner.probe.imports import import_machine, read_nvbandwidth, with_nvbandwidth
from gnnplan.planner.probe.presets import load_preset


def gpu(dev: int, *links: tuple[str, int, str]) -> str:
    inside = "".join(f'<nvlink target="{t}" count="{n}" tclass="{c}"/>' for t, n, c in links)
    return (
        f'<pci busid="0000:{dev + 16:02x}:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" '
        f'link_width="16"><gpu dev="{dev}" sm="80" rank="{dev}" gdr="1">{inside}</gpu></pci>'
    )


def system(*cpus: str) -> str:
    body = "".join(f'<cpu numaid="{n}" arch="x86_64">{c}</cpu>' for n, c in enumerate(cpus))
    return f'<system version="1">{body}</system>'


def bridge(bus: str, *inside: str) -> str:
    return f'<pci busid="0000:{bus}:00.0" class="0x060400">{"".join(inside)}</pci>'


GPU_CLASS, SWITCH_CLASS = "0x030200", "0x068000"
PAIRS = system(
    bridge(
        "01",
        gpu(0, ("0000:11:00.0", 12, GPU_CLASS)),
        gpu(1, ("0000:10:00.0", 12, GPU_CLASS)),
    ),
    bridge("02", gpu(2, ("0000:13:00.0", 12, GPU_CLASS)))
    + bridge("03", gpu(3, ("0000:12:00.0", 12, GPU_CLASS))),
)


def imported(
    tmp_path: Path, text: str, onto: str = "siton", name: str = "topo.xml"
) -> MachineModel:
    path = tmp_path / name
    path.write_text(text)
    return import_machine(path, load_preset(onto))


def test_a_topology_gives_gpus_pairs_switches_and_numa_nodes(tmp_path: Path):
    found = imported(tmp_path, PAIRS)
    assert [g.name for g in found.gpus] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert [g.numa_node for g in found.gpus] == [0, 0, 1, 1]
    assert found.cliques == [["gpu0", "gpu1"], ["gpu2", "gpu3"]]
    links = {x.name: x for x in found.links}
    assert links["pcie0.h2d"].source == "plx0"  # two GPUs under one bridge
    assert links["pcie2.h2d"].source == "host0"
    assert links["pcie0.h2d"].bandwidth_bytes_per_second == pytest.approx(16 * 1.969e9)
    assert links["nvlink.gpu0.gpu1"].bandwidth_bytes_per_second == pytest.approx(12 * 25e9)
    assert links["nvlink.gpu0.gpu1"].transaction_bytes == 32  # as in the machine it is put onto
    both = [Reader(name=g, routes=routes(found, "host0", g)) for g in ("gpu0", "gpu1", "gpu2")]
    seconds = row_seconds(both, 512)
    assert seconds["gpu0"] == pytest.approx(2 * seconds["gpu2"])
    assert any("topo.xml" in note for note in found.notes)


def test_links_to_a_switch_join_all_gpus(tmp_path: Path):
    four = [gpu(d, ("0000:c4:00.0", 12, SWITCH_CLASS)) for d in range(4)]
    found = imported(tmp_path, system(*four), onto="dgx-a100")
    assert found.cliques == [[f"gpu{d}" for d in range(4)]]
    assert "nvswitch0" in {s.name for s in found.switches}


def case(name: str, matrix: list[list[Any]], status: str = "Passed") -> dict[str, Any]:
    return {"name": name, "status": status, "bandwidth_matrix": matrix}


def rates(*cases: dict[str, Any]) -> str:
    return json.dumps({"nvbandwidth": {"Driver Version": "1", "testcases": list(cases)}})


def test_measured_rates_replace_the_presets_and_say_so(tmp_path: Path):
    text = rates(
        case("host_to_device_memcpy_ce", [["26.1", "26.2", "26.3", "26.4"]]),
        case("host_to_device_memcpy_sm", [["24.0", "N/A", "24.2", "24.3"]]),
        case("host_to_all_memcpy_ce", [["13.0", "13.5", "26.0", "25.0"]]),
        case(
            "device_to_device_memcpy_read_ce",
            [["N/A", "270", "20", "20"], ["271", "N/A", "20", "20"], *[["N/A"] * 4] * 2],
        ),
        case("multinode_device_to_device_memcpy_read_ce", [["1"]], "Waived"),
    )
    machine = imported(tmp_path, PAIRS)
    (tmp_path / "r.json").write_text(text)
    found = with_nvbandwidth(machine, *read_nvbandwidth(tmp_path / "r.json"))
    links = {x.name: x for x in found.links}
    assert links["pcie1.h2d"].bandwidth_bytes_per_second == 26.2e9
    assert links["pcie1.h2d"].provenance == "measured"
    assert links["pcie0.h2d"].gather_bytes_per_second == 24.0e9
    share = 0.75 / 0.82  # of the preset, where kernels' reads were not measured
    assert links["pcie1.h2d"].gather_bytes_per_second == pytest.approx(26.2e9 * share)
    assert links["plx0.h2d"].bandwidth_bytes_per_second == 26.5e9  # 13.0 + 13.5 together
    # The row's GPU reads the column's.
    assert links["nvlink.gpu1.gpu0"].bandwidth_bytes_per_second == 270e9
    assert links["nvlink.gpu0.gpu1"].bandwidth_bytes_per_second == 271e9
    assert links["pcie1.d2h"].provenance == "derived"
    assert any("was waived" in note for note in found.notes)


def test_another_number_of_gpus_is_refused(tmp_path: Path):
    text = rates(case("host_to_device_memcpy_ce", [["26.1", "26.2"]]))
    with pytest.raises(MachineError, match=r"expected 8 GPUs \(those of siton\), found 2"):
        imported(tmp_path, text, name="r.json")


def test_the_command_writes_a_machine_that_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, out = tmp_path / "t.xml", tmp_path / "machine.json"
    source.write_text(PAIRS)
    arguments = ["machine", "import", str(source), "--onto", "siton", "-o", str(out)]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cliques"] == [["gpu0", "gpu1"], ["gpu2", "gpu3"]]
    assert len(load_machine(out).gpus) == 4
    assert main(["machine", "show", str(out)]) == 0


BOMB = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    "<system>&b;</system>"
)
BAD = {
    "empty": "",
    "text": "hello",
    "array": "[1]",
    "other xml": "<graphs/>",
    "no gpu": system(""),
    "cut": PAIRS[:200],
    "entities": BOMB,
    "external": '<!DOCTYPE s SYSTEM "file:///etc/passwd"><system/>',
    "twice": system(gpu(0), gpu(0)),
    "from one": system(gpu(1)),
    "words for numbers": PAIRS.replace('dev="2"', 'dev="two"'),
    "huge number": PAIRS.replace('count="12"', 'count="999999"'),
    "deep": "<system>" + "<pci>" * 200 + "</pci>" * 200 + "</system>",
    "json of something": '{"a": 1}',
    "no tests": rates(),
    "all waived": rates(case("host_to_device_memcpy_ce", [["1"]], "Waived")),
    "ragged": rates(case("host_to_device_memcpy_ce", [["1", "2"], ["3"]])),
    "no rows": rates(case("host_to_device_memcpy_ce", [])),
    "not a number": rates(case("host_to_device_memcpy_ce", [["fast"]])),
    "negative": rates(case("host_to_device_memcpy_ce", [["-1"] * 8])),
    "infinite": rates(case("host_to_device_memcpy_ce", [["inf"] * 8])),
    "nested": "{" + '"a":{' * 5000,
}


def refused(path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refusal; anything else fails."""
    code = main(["machine", "import", str(path), "--onto", "siton", "-o", str(out)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2, lines
    assert len(lines) == 1, lines
    assert not out.exists()
    return lines[0]


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_neither_is_one_line_and_code_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "f"
    path.write_text(BAD[name])
    line = refused(path, tmp_path / "m.json", capsys)
    if name in ("entities", "external"):
        assert "DOCTYPE" in line


def test_a_missing_file_and_a_machine_without_gpus_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    refused(tmp_path / "nowhere", tmp_path / "m.json", capsys)
    with pytest.raises(MachineError, match="a machine with GPUs"):
        imported(tmp_path, PAIRS, onto="cpu-2core")


GOOD_JSON = rates(case("host_to_device_memcpy_ce", [[str(20 + g) for g in range(8)]]))


@pytest.mark.parametrize("text", [PAIRS, GOOD_JSON], ids=["xml", "json"])
def test_files_damaged_at_random_are_read_or_refused_and_never_crash(tmp_path: Path, text: str):
    rng, onto, read = random.Random(7), load_preset("siton"), 0
    words: list[str] = []
    path = tmp_path / "f"
    for _ in range(300):
        data = bytearray(text.encode())
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            action = rng.random()
            if action < 0.4:
                data[at] = rng.randrange(256)
            elif action < 0.7:
                del data[at : at + rng.randint(1, 30)]
            else:
                data[at:at] = bytes(rng.choices(b'<>"/&{}[],:0123456789NaN', k=rng.randint(1, 8)))
            if not data:
                break
        path.write_bytes(bytes(data))
        try:
            import_machine(path, onto)
            read += 1
        except MachineError as error:
            words.append(str(error))
    assert 0 < len(words) == 300 - read
    assert not [text for text in words if "\n" in text]


def test_damage_that_fuzzing_found_is_refused_in_one_line(tmp_path: Path):
    many = gpu(0, *[("0000:11:00.0", 36, GPU_CLASS)] * 5000)
    for text, words in (
        (
            PAIRS.replace("<system", '<?xml version="1.0" encoding="none-such"?><system', 1),
            "not XML",
        ),
        (system(many), "at most 36 NVLinks"),
        (system(*[gpu(d) for d in range(90)]), "1 to 64 GPUs"),
        (rates(case("host_to_device_memcpy_ce", [[10**400] * 8])), "nvbandwidth"),
        (rates(case("a\nb", [["fast"]])), "nvbandwidth"),
        ("[" * 100_000, "neither"),
        ('{"nvbandwidth":' + "[" * 100_000, "nested too deeply"),
    ):
        with pytest.raises(MachineError, match=words) as caught:
            imported(tmp_path, text)
        assert "\n" not in str(caught.value)


def test_an_address_that_is_none_is_no_address(tmp_path: Path):
    found = imported(tmp_path, PAIRS.replace("0000:10:00.0", "soon:10:00.0"))
    assert [g.name for g in found.gpus] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert found.gpus[0].bus_id == ""
