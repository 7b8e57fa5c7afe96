"""$CUDA_VISIBLE_DEVICES and slices, as the CUDA programming guide and the MIG user guide say."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnnplan.runtime.device import (
    VARIABLE,
    Listed,
    find_gpu,
    machine_facts,
    other_gpus,
    read_slices,
    shown_gpus,
)
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import PLAN_FILE, load_plan, with_identity
from gnnplan.runtime.plan.schema import Plan
from tests.support.nvml_recording import Replay
from tests.support.plans import make_plan
from tests.support.recordings import divide, look, recorded, slice_uuid

WHOLE = [Listed(uuid=f"GPU-{name}") for name in ("aa11", "aa22", "bb33", "cc44")]
A, B = "MIG-11aa", "MIG-11bb"
DIVIDED = [
    Listed(uuid="GPU-aa11"),
    Listed(uuid="GPU-aa22", slices=[A, B]),
    Listed(uuid="GPU-bb33", slices=[]),
]


def numbers(text: str | None, listed: list[Listed] = WHOLE) -> list[Any]:
    shown = shown_gpus(listed, {} if text is None else {VARIABLE: text})
    return [each.gpu if each.slice is None else (each.gpu, each.slice) for each in shown]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,0", [3, 0]),
        (" 1 , 2 ", [1, 2]),
        ("-1", []),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("0,one,1", [0]),
        ("0,,1", [0]),
        ("1gpu,2", [1, 2]),
        ("0,0", []),
        ("NoDevFiles", []),
        ("99999999999999999999", []),
        ("GPU-bb33", [2]),
        ("GPU-b,GPU-aa1", [2, 0]),
        ("GPU-aa", []),
        ("GPU-cc44,GPU-none,GPU-bb33", [3]),
        ("GPU-cc44,0", [3]),
        ("0,GPU-cc44", [0]),
        ("GPU-cc44,GPU-cc", []),
        ("MIG-11aa", []),
    ],
)
def test_whole_gpus(text: str | None, expected: list[int]) -> None:
    assert numbers(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, [(1, 0)]),
        ("0", [0]),
        ("1", [(1, 0)]),
        ("0,1", [(1, 0)]),
        ("2", []),
        (A, [(1, 0)]),
        ("MIG-11b", [(1, 1)]),
        ("MIG-11", []),
        (f"{B},{A}", [(1, 1)]),
        ("GPU-aa11", [0]),
        ("GPU-aa22", [(1, 0)]),
    ],
)
def test_of_slices_one_is_shown_and_no_whole_gpu_beside_it(
    text: str | None, expected: list[Any]
) -> None:
    assert numbers(text, DIVIDED) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, [1]), ("0", [0]), ("0,1", [1]), ("2,1,0", [2]), ("GPU-b", [1]), ("0,GPU-b", [0])],
)
def test_a_divided_gpu_whose_slices_are_unknown_stands_for_the_one_that_is_shown(
    text: str | None, expected: list[int]
) -> None:
    unnamed = [Listed(uuid=f"GPU-{name}", divided=name != "a") for name in "abc"]
    assert numbers(text, unnamed) == expected
    named = [*unnamed, Listed(uuid="GPU-d", slices=[A, B], divided=True)]
    assert numbers(None, named) == [(3, 0)]


def test_a_fingerprint_is_of_one_slice_also_where_the_driver_names_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Replay(recorded("mig")))
    monkeypatch.delenv(VARIABLE, raising=False)
    facts = machine_facts()
    assert [gpu["uuid"][-1] for gpu in facts["gpus"]] == ["0"]
    assert len(facts["box_gpus"]) == 1


def test_torch_reads_the_variable_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch.cuda", reason="this torch has no torch.cuda")
    if not hasattr(torch, "_parse_visible_devices"):
        pytest.skip("this torch has no _parse_visible_devices to compare with")
    for text in ("", "2", "3,0", "1,-1,2", "0,one,1", "0,0", "1gpu,2", "-1", "0,GPU-cc44"):
        monkeypatch.setenv(VARIABLE, text)
        assert numbers(text) == torch._parse_visible_devices(), text


class Driver:
    """Answers for slices as told: a handle, or the code of an error."""

    class NVMLError(Exception):
        """As in pynvml."""

        value = 0

    def __init__(self, answers: list[str | int]) -> None:
        self.answers = answers

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        del handle
        return len(self.answers)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        del handle
        answer = self.answers[index]
        if isinstance(answer, int):
            error = self.NVMLError()
            error.value = answer
            raise error
        return answer


def test_a_fingerprint_is_of_the_gpus_that_cuda_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(divide(recorded("nvswitch-8"), 5, [10, 20]))
    # What is recorded of the module is answered, its memory of slices too.
    monkeypatch.setitem(sys.modules, "pynvml", replay)

    def facts(text: str | None) -> list[tuple[str, int]]:
        monkeypatch.delenv(VARIABLE, raising=False)
        if text is not None:
            monkeypatch.setenv(VARIABLE, text)
        return [(gpu["uuid"], gpu["memory_bytes"] >> 30) for gpu in machine_facts()["gpus"]]

    assert facts(None) == [(slice_uuid(5, 0), 10)]
    assert facts(slice_uuid(5, 1)) == [(slice_uuid(5, 1), 20)]
    assert [size for _, size in facts("0,3")] == [80, 80]
    assert facts("") == []


def test_slices_are_those_that_the_driver_names() -> None:
    assert read_slices(Driver(["a", 6, "b", 6]), "gpu") == ["a", "b"]
    assert read_slices(Driver([6, 2]), "gpu") == []
    assert read_slices(Driver([4, 4]), "gpu") is None  # it may not be asked
    assert read_slices(object(), "gpu") is None  # an old module


def planned(graph: Graph, folder: Path, uuids: list[str], hosts: list[int] | None = None) -> Plan:
    """A plan of as many ranks, on GPUs 0, 1, ... of each host, which had those UUIDs."""
    places = hosts or [0] * len(uuids)
    made = make_plan(graph, folder, ranks=len(uuids), hosts=hosts)
    devices = [
        replace(each, kind="cuda", index=places[:rank].count(places[rank]))
        for rank, each in enumerate(made.strategy.devices)
    ]
    strategy = replace(made.strategy, devices=devices)
    return replace(made, strategy=strategy, gpu_uuids=uuids)


EIGHT = [gpu.uuid for gpu in look(recorded("nvswitch-8"), {}).gpus]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("3,2,1,0,7", [3, 2, 1, 0]),
        (",".join(EIGHT[each] for each in (6, 1, 0, 3, 2)), [2, 1, 4, 3]),
    ],
)
def test_a_ranks_gpu_is_found_by_its_uuid_whatever_its_number_is(
    monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path,
    text: str | None, numbers: list[int],
) -> None:  # fmt: skip
    shown = EIGHT
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
        shown = [gpu.uuid for gpu in look(recorded("nvswitch-8"), {VARIABLE: text}).gpus]
    plan = planned(small_graph, tmp_path / "p", EIGHT[:4])
    # torch gives UUIDs without their kind.
    bare = [uuid.removeprefix("GPU-") for uuid in shown]
    assert [find_gpu(plan, rank, bare) for rank in range(4)] == numbers


def test_a_gpu_that_is_not_shown_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, small_graph: Graph, tmp_path: Path
) -> None:
    plan = planned(small_graph, tmp_path / "p", EIGHT[:4])
    monkeypatch.setenv(VARIABLE, "0,1")
    line = rf"rank 3: expected GPU 3 \({EIGHT[3]}\), found .*VISIBLE_DEVICES=0,1 shows\); show it"
    with pytest.raises(InputError, match=line):
        find_gpu(plan, 3, EIGHT[:2])
    with pytest.raises(InputError, match="rank 3: expected GPU 3, found 2 on this host"):
        find_gpu(plan, 3, ["GPU-x", "GPU-y"])


def test_an_equal_host_is_accepted_with_one_line_and_ranks_go_by_number(
    small_graph: Graph, tmp_path: Path
) -> None:
    plan = planned(small_graph, tmp_path / "p", EIGHT[:4])
    others = [f"GPU-{each}" for each in "abcd"]
    assert [find_gpu(plan, rank, others) for rank in range(4)] == [0, 1, 2, 3]
    here = [{"uuid": uuid} for uuid in others]
    assert other_gpus(plan, {"gpus": here}).startswith("the GPUs here are others than those")
    assert other_gpus(plan, {"gpus": [{"uuid": uuid} for uuid in EIGHT]}) == ""
    preset = replace(plan, gpu_uuids=[])
    assert other_gpus(preset, {"gpus": here}) == ""
    assert find_gpu(preset, 2, others) == 2


def test_each_host_has_uuids_of_its_own(small_graph: Graph, tmp_path: Path) -> None:
    plan = planned(small_graph, tmp_path / "p", EIGHT[:4], hosts=[0, 0, 1, 1])
    assert find_gpu(plan, 3, [EIGHT[3], EIGHT[2]]) == 0
    assert find_gpu(plan, 1, [EIGHT[0], EIGHT[1]]) == 1


def test_uuids_are_in_the_plan_and_not_in_its_identity(small_graph: Graph, tmp_path: Path) -> None:
    plan = make_plan(small_graph, tmp_path / "p", ranks=2)
    text = (tmp_path / "p" / PLAN_FILE).read_text()
    assert "gpu_uuids" not in text
    document = json.loads(text) | {"gpu_uuids": EIGHT[:2]}
    (tmp_path / "p" / PLAN_FILE).write_text(json.dumps(document))
    found = load_plan(tmp_path / "p")
    assert (found.gpu_uuids, found.plan_id) == (EIGHT[:2], plan.plan_id)
    assert with_identity(found).plan_id == plan.plan_id
