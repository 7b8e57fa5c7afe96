"""Plans round-trip, keep their identity, and refuse damage."""

import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.planner.request import check_output
from gnnplan.runtime import codec, folders
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.folders import Unfinished
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan import io as plan_io
from gnnplan.runtime.plan.io import (
    PLAN_FILE,
    load_array,
    load_plan,
    refuse_foreign_folder,
    save_plan,
    with_identity,
)
from gnnplan.runtime.plan.schema import (
    Certificate,
    Device,
    FeaturePlacement,
    GraphRef,
    Interval,
    MachineRef,
    MemoryUse,
    Plan,
    Prediction,
    Sampler,
    Source,
    Strategy,
    Workload,
)
from tests.support.plans import make_plan


def example() -> Plan:
    interval = Interval(value=1.0, low=0.9, high=1.1)
    return Plan(
        version="0",
        graph=GraphRef(
            name="g",
            path="/g",
            fingerprint="f",
            num_nodes=4,
            num_edges=5,
            feature_dim=2,
            feature_dtype="float32",
            num_classes=2,
            task="multiclass",
            num_train=2,
        ),
        machine=MachineRef(name="m", fingerprint="a", calibration="b", provenance="preset"),
        workload=Workload(),
        strategy=Strategy(
            features=FeaturePlacement(
                policy="host",
                sources=[Source(kind="own"), Source(kind="host")],
                own_rows=[0],
                row_bytes=8,
                storage_dtype="float32",
            ),
            devices=[Device(rank=0, kind="cpu")],
        ),
        prediction=Prediction(
            step_seconds=interval,
            epoch_seconds=interval,
            steps_per_epoch=1,
            startup_seconds=1.0,
            stages={"sample": 0.5},
            stage_core_seconds={"sample": 0.5},
            traffic_bytes={},
            hit_rates={"0": {"host": 1.0}},
            memory_bytes={"host0": MemoryUse(parts={"a": 1}, total=1, capacity=2, headroom=1)},
            bottleneck="cores",
        ),
        certificate=Certificate(
            objective=1.0, lower_bound=1.0, gap=0.0, solver="sort", status="optimal"
        ),
    )


ARRAYS = {"one": np.arange(4, dtype=np.uint32), "two": np.arange(4, dtype=np.uint32)}


def test_a_plan_reads_back_as_it_was_written(tmp_path: Path):
    saved = save_plan(example(), ARRAYS, tmp_path / "p")
    assert load_plan(tmp_path / "p", verify_arrays=True) == saved
    assert (load_array(saved, tmp_path / "p", "two") == ARRAYS["two"]).all()


def test_a_whole_number_where_fractions_are_allowed_keeps_the_identity(tmp_path: Path):
    plan = example()
    sampler = Sampler(name="labor", parameters={})
    sampler.parameters["kappa"] = 4  # type checks of the tests would not let it in otherwise
    plan = replace(plan, strategy=replace(plan.strategy, sampler=sampler))
    saved = save_plan(plan, {}, tmp_path / "plan")
    assert load_plan(tmp_path / "plan") == saved
    assert saved.strategy.sampler.parameters == {"kappa": 4.0}


def test_equal_arrays_share_a_file_and_repetition_is_byte_identical(tmp_path: Path):
    save_plan(example(), ARRAYS, tmp_path / "a")
    save_plan(example(), ARRAYS, tmp_path / "b")
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == ["one.npy", "plan.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.uint64).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.zeros((0, 3), np.float32),
        np.array([True, False]),
        np.arange(10)[::3],
    ],
    ids=["rows", "columns", "empty", "flags", "strided"],
)
def test_an_array_is_written_as_numpy_would(tmp_path: Path, array: NDArray[Any]):
    saved = save_plan(example(), {"one": array, "same": array}, tmp_path / "p")
    expected = io.BytesIO()
    np.save(expected, np.ascontiguousarray(array))
    written = (tmp_path / "p" / "one.npy").read_bytes()
    assert written == expected.getvalue()
    assert saved.arrays["one"].sha256 == hashlib.sha256(written).hexdigest()
    assert saved.arrays["same"].file == "one.npy"


def test_identity_changes_with_content(tmp_path: Path):
    first = save_plan(example(), ARRAYS, tmp_path / "a")
    second = save_plan(replace(example(), statistics_class="unbiased"), ARRAYS, tmp_path / "b")
    assert first.plan_id != second.plan_id


def test_a_folder_with_other_files_is_refused_and_untouched(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(PlanError, match="expected an empty folder or an earlier plan"):
        save_plan(example(), ARRAYS, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_full_disk_leaves_the_earlier_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = save_plan(example(), ARRAYS, tmp_path / "p")

    plain = Path.open

    def full_disk(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
        if "w" in mode:
            raise OSError(28, "No space left on device")
        return plain(path, mode, *args, **named)

    monkeypatch.setattr(Path, "open", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_plan(replace(example(), version="1"), ARRAYS, tmp_path / "p")
    assert load_plan(tmp_path / "p") == saved
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.pop("graph"), "'graph' of Plan is missing"),
        (lambda d: d.update(schema_version=99), "schema_version"),
        (lambda d: d.update(version="other"), "does not match its plan_id"),
        (lambda d: d["strategy"].update(mode="sideways"), "expected one of"),
    ],
)
def test_an_altered_plan_is_refused(tmp_path: Path, edit, words: str):
    save_plan(example(), ARRAYS, tmp_path / "p")
    path = tmp_path / "p" / "plan.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=words):
        load_plan(tmp_path / "p")


def test_a_plan_of_before_a_field_was_added_is_read_with_its_default(tmp_path: Path):
    save_plan(example(), ARRAYS, tmp_path / "p")
    path = tmp_path / "p" / PLAN_FILE
    document = json.loads(path.read_text())
    del document["strategy"]["threads"]["capture"]
    bare = codec.content_hash({**document, "plan_id": ""})
    path.write_text(codec.dumps({**document, "plan_id": bare[:32]}))
    assert load_plan(tmp_path / "p").strategy.threads.capture == 0


def test_truncated_files_are_refused(tmp_path: Path):
    plan = save_plan(example(), ARRAYS, tmp_path / "p")
    array = tmp_path / "p" / "one.npy"
    array.write_bytes(array.read_bytes()[:-3])
    with pytest.raises(PlanError, match="plan again"):
        load_array(plan, tmp_path / "p", "one")
    with pytest.raises(PlanError, match="sha256"):
        load_plan(tmp_path / "p", verify_arrays=True)
    text = tmp_path / "p" / "plan.json"
    text.write_text(text.read_text()[:50])
    with pytest.raises(PlanError, match="not readable as JSON"):
        load_plan(tmp_path / "p")


def test_a_link_to_a_folder_stays_and_leads_to_the_plan(tmp_path: Path):
    (tmp_path / "large").mkdir()
    (tmp_path / "p").symlink_to("large")
    for version in ("0", "1"):
        saved = save_plan(replace(example(), version=version), ARRAYS, tmp_path / "p")
        assert load_plan(tmp_path / "large") == saved
    assert (tmp_path / "p").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large", "p"]


def test_a_folder_that_is_no_plan_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match=r"found no plan\.json"):
        load_plan(tmp_path)


@pytest.mark.parametrize(
    "module",
    [
        "gnnplan.runtime.plan.io",
        "gnnplan.planner.cost",
        "gnnplan.planner.placement",
        "gnnplan.planner.settings",
        "gnnplan.api.app",
    ],
)
def test_importing_the_pure_layers_does_not_import_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_runtime_imports_without_the_planners_dependencies():
    blocked = ["pydantic", "typer", "rich", "pulp", "fastapi", "sqlalchemy", "networkx", "yaml"]
    code = (
        "import sys, pkgutil, importlib, runtime\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "for m in pkgutil.walk_packages(runtime.__path__, 'runtime.'):\n"
        "    importlib.import_module(m.name)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_an_array_outside_the_plans_folder_is_refused(small_graph: Graph, tmp_path: Path):
    plan = make_plan(small_graph, tmp_path / "plan", own_rows=4)
    name, ref = next(iter(plan.arrays.items()))
    np.save(tmp_path / "secret.npy", np.arange(3))
    away = replace(plan, arrays={**plan.arrays, name: replace(ref, file="../secret.npy")})
    (tmp_path / "plan" / PLAN_FILE).write_text(codec.dumps(with_identity(away)))
    with pytest.raises(PlanError, match="in a file beside it"):
        load_plan(tmp_path / "plan")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00"])
def test_an_array_file_that_is_none_is_refused(small_graph: Graph, tmp_path: Path, content: bytes):
    plan = make_plan(small_graph, tmp_path / "plan", own_rows=4)
    name, ref = next(iter(plan.arrays.items()))
    (tmp_path / "plan" / ref.file).write_bytes(content)
    with pytest.raises(PlanError, match="cannot be read"):
        load_array(plan, tmp_path / "plan", name)


@pytest.mark.parametrize(
    "other",
    [np.arange(5, dtype=np.uint32), np.zeros((2, 2), np.uint32), np.arange(4, dtype=np.int32)],
)
def test_an_array_of_another_shape_or_type_is_refused(tmp_path: Path, other: NDArray[Any]):
    saved = save_plan(example(), ARRAYS, tmp_path / "p")
    np.save(tmp_path / "p" / saved.arrays["one"].file, other)
    found = f"{other.dtype}{list(other.shape)}"
    with pytest.raises(PlanError, match=re.escape(f"expected uint32[4], found {found}")):
        load_array(saved, tmp_path / "p", "one")


def test_a_trained_plan_is_kept_whole_where_another_takes_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = {"own_rows_0": np.arange(2)}
    first = save_plan(example(), arrays, tmp_path / "p")
    checkpoint = tmp_path / "p" / "run" / "checkpoints" / "weights"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text("hours of work")
    # The same plan again: its folder and its run stay as they are.
    save_plan(example(), arrays, tmp_path / "p")
    assert checkpoint.read_text() == "hours of work"
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    for number, name in ((1, "p.previous"), (2, "p.previous-2")):
        other = save_plan(replace(example(), version=str(number)), arrays, tmp_path / "p")
        assert other.plan_id != first.plan_id
        assert load_plan(tmp_path / "p").plan_id == other.plan_id
        assert str(tmp_path / name) in caplog.text
        (tmp_path / "p" / "run").mkdir()
    assert load_plan(tmp_path / "p.previous", verify_arrays=True).plan_id == first.plan_id
    kept = tmp_path / "p.previous" / "run" / "checkpoints" / "weights"
    assert kept.read_text() == "hours of work"


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_a_trained_plan_is_kept_where_its_process_ends_as_another_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """They have changed places, and the trained one bears the name of what was being written."""
    first = save_plan(example(), ARRAYS, tmp_path / "p")
    (tmp_path / "p" / "run").mkdir()
    take_name = folders.take_name

    def end(made: Path, target: Path) -> None:
        take_name(made, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(plan_io, "take_name", end)
        if how == "killed":
            patch.setattr(plan_io, "_leave_name", lambda *_: None)
            patch.setattr(Unfinished, "remove", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            save_plan(replace(example(), version="1"), ARRAYS, tmp_path / "p")
    other = save_plan(replace(example(), version="2"), ARRAYS, tmp_path / "p")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "p.previous"]
    assert load_plan(tmp_path / "p") == other
    assert load_plan(tmp_path / "p.previous", verify_arrays=True) == first
    assert (tmp_path / "p.previous" / "run").is_dir()


def test_what_a_killed_process_left_of_a_plan_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from gnnplan.runtime.plan.io import plan_in_making\n"
        "with plan_in_making(Path(sys.argv[1])) as made:\n"
        "    (made / 'own.npy').write_bytes(b'much')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "p")], check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "own.npy").is_file()
    with plan_io.plan_in_making(tmp_path / "q") as living:
        save_plan(example(), ARRAYS, tmp_path / "p")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, "p"])


def test_a_plan_in_whose_folder_a_training_runs_is_not_replaced(tmp_path: Path) -> None:
    first = save_plan(example(), ARRAYS, tmp_path / "p")
    (tmp_path / "p" / "run").mkdir()
    with folders.hold(tmp_path / "p" / "run"):
        for make in (refuse_foreign_folder, lambda p: save_plan(example(), {}, p), check_output):
            with pytest.raises(PlanError, match=r"found a training that runs in its folder run; "):
                make(tmp_path / "p")
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert load_plan(tmp_path / "p") == first
    save_plan(replace(example(), version="1"), ARRAYS, tmp_path / "p")
    assert load_plan(tmp_path / "p.previous") == first


def copy_until(number: int, source: Path, out: Path, patch: pytest.MonkeyPatch) -> bool:
    """Copy a plan, ending before the n-th name is changed or removed; whether all was done."""
    numbers = itertools.count()

    def counted(call: Any) -> Any:
        def end_or_call(*args: Any, **named: Any) -> Any:
            if next(numbers) == number:
                raise KeyboardInterrupt
            return call(*args, **named)

        return end_or_call

    for name in ("rename", "unlink"):
        patch.setattr(Path, name, counted(getattr(Path, name)))
    with suppress(KeyboardInterrupt):
        plan_io.copy_plan(source, out)
    return next(numbers) <= number


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_a_plan_that_is_copied_is_the_one_or_the_other_whenever_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    plans = [
        save_plan(replace(example(), version=folder.name), arrays, folder)
        for folder, arrays in (
            (one, {"both": np.arange(3), "first": np.arange(4)}),
            (two, {"both": np.arange(5), "second": np.arange(4)}),
        )
    ]
    found, is_done = list[Plan](), False
    while not is_done:
        out = tmp_path / f"out-{len(found)}"
        plan_io.copy_plan(one, out)
        (out / "run").mkdir()
        with monkeypatch.context() as patch:
            if how == "killed":
                patch.setattr("shutil.rmtree", lambda *_, **__: None)
            is_done = copy_until(len(found), two, out, patch)
        found.append(load_plan(out, verify_arrays=True))
        assert {path.name for path in out.glob("*.npy")} == {
            ref.file for ref in found[-1].arrays.values()
        }
        assert (out / "run").is_dir()
        assert plan_io.copy_plan(two, out) == load_plan(out, verify_arrays=True) == plans[1]
    assert len(found) >= 6
    assert found == [plans[0]] * 2 + [plans[1]] * (len(found) - 2)


def test_a_plan_that_was_not_trained_is_replaced(tmp_path: Path) -> None:
    save_plan(example(), {"own_rows_0": np.arange(2), "old": np.arange(9)}, tmp_path / "p")
    save_plan(example(), {"own_rows_0": np.arange(2)}, tmp_path / "p")
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == [
        "own_rows_0.npy",
        "plan.json",
    ]
