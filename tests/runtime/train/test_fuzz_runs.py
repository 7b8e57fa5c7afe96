"""Fuzzing of what a run leaves for the one after it: checkpoints, epochs, its ranks' errors."""

import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from gnnplan.runtime import codec
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.faults.failure import (
    ERRORS_FOLDER,
    LAUNCH_FAILURE,
    EndedRank,
    RankFailure,
    attempt_line,
    failure_of,
    is_final,
)
from gnnplan.runtime.report import EpochReport
from gnnplan.runtime.train.recovery import (
    EPOCHS_FILE,
    Mark,
    _digest,
    append_epochs,
    list_checkpoints,
    load_newest,
    read_epochs,
    save_checkpoint,
    state_of,
)
from tests.support.fuzzing import fuzzed, limited, refused
from tests.support.mutations import damaged, damaged_json

STEPS = (3, 5, 8)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three; do not write into it."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in STEPS:
        state = {"steps": step, "plan_id": "p", "model": {"w": torch.full((20,), float(step))}}
        save_checkpoint(folder, step, state, keep=3)
    return folder


@fuzzed(40)
@given(data=st.data())
def test_a_damaged_checkpoint_is_passed_over(
    checkpoints: Path, tmp_path: Path, data: st.DataObject
):
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        copy = Path(name) / "checkpoints"
        shutil.copytree(checkpoints, copy)
        whole = list(STEPS)
        for place in data.draw(st.sets(st.integers(0, 2), min_size=1)):
            victim = list_checkpoints(checkpoints)[place].name
            before = (copy / victim).read_bytes()
            (copy / victim).write_bytes(data.draw(damaged(before)))
            if (copy / victim).read_bytes() != before:
                whole.remove(STEPS[place])
        found: list[dict[str, Any] | None] = []
        assert refused(lambda: found.append(load_newest(copy))) is None
        (state,) = found
        assert (state and state["steps"]) == (whole[-1] if whole else None)


@fuzzed(40)
@given(data=st.data())
def test_a_checkpoint_of_the_right_name_is_refused_in_one_line_or_a_state(
    checkpoints: Path, tmp_path: Path, data: st.DataObject
):
    """The digest in a name is of the content, whoever wrote it: the content must be harmless."""
    newest = list_checkpoints(checkpoints)[-1].read_bytes()
    content = data.draw(damaged(newest))
    path = tmp_path / f"checkpoint-{9:010d}-{_digest(content)}.pt"
    path.write_bytes(content)
    try:
        found: list[Any] = []
        text = refused(lambda: found.append(load_newest(tmp_path)))
        assert text is not None or isinstance(found[0], dict)
    finally:
        path.unlink()


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.place,)


def test_a_checkpoint_runs_no_code(tmp_path: Path):
    place = tmp_path / "made"
    torch.save({"model": Harmful(place)}, tmp_path / "state.pt")
    for content in ((tmp_path / "state.pt").read_bytes(), pickle.dumps(Harmful(place))):
        with pytest.raises(GnnplanError, match="expected a checkpoint"):
            state_of(content)
        assert not place.exists()


@fuzzed(40)
@given(data=st.data())
def test_damaged_reports_of_epochs_are_refused(tmp_path: Path, data: st.DataObject):
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        folder = Path(name)
        known = [
            EpochReport(epoch=i, seconds=0.5, steps=3, loss=1.0, first_loss=2.0, last_loss=0.5)
            for i in range(4)
        ]
        mark = append_epochs(folder, known, Mark())
        path = folder / EPOCHS_FILE
        whole = path.read_bytes()
        path.write_bytes(data.draw(damaged(whole)))
        with limited():
            try:
                assert read_epochs(folder, mark) == known
            except ValueError:
                assert not path.read_bytes().startswith(whole)


ERRORS: dict[str, Any] = {
    "rank0.json": RankFailure(rank=0, time=1.0, kind="RuntimeError", line="a", consequence=False),
    "rank1.json": RankFailure(rank=1, time=2.0, kind="InputError", line="b", consequence=False),
    LAUNCH_FAILURE: [EndedRank(attempt=0, rank=2, exit_code=-9, line="")],
}


@fuzzed(40)
@given(data=st.data())
def test_damaged_errors_of_ranks_still_end_in_one_line(tmp_path: Path, data: st.DataObject):
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        run = Path(name)
        (run / ERRORS_FOLDER).mkdir()
        for name, known in ERRORS.items():
            (run / ERRORS_FOLDER / name).write_text(codec.dumps(known))
        victim = run / ERRORS_FOLDER / data.draw(st.sampled_from(sorted(ERRORS)))
        whole = victim.read_bytes()
        asked = st.one_of(damaged_json(codec.parse(whole)), damaged(whole))
        victim.write_bytes(data.draw(asked))
        with limited():
            text = str(failure_of(run, run / "log"))
            assert attempt_line(run, 0)
            assert is_final(run, 0) in (True, False)
        assert text
        assert len(text) < 10_000
