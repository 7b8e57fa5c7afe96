"""A finished folder takes a name in one step, and what had it is handed back whole."""

import os
import threading
from pathlib import Path

import pytest

from gnnplan.runtime import folders
from gnnplan.runtime.folders import free_name, take_name


def made(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / f".new-{text}"
    folder.mkdir()
    (folder / "a").write_text(text)
    return folder


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_renameat2", lambda: None)


@pytest.mark.parametrize("exchange", [True, False])
def test_an_earlier_folder_is_handed_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        without_exchange(monkeypatch)
    target = tmp_path / "name"
    assert take_name(made(tmp_path, "one"), target) is None
    earlier = take_name(made(tmp_path, "two"), target)
    assert earlier is not None
    assert (target / "a").read_text() == "two"
    assert (earlier / "a").read_text() == "one"
    assert earlier.name.startswith(".")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([earlier.name, "name"])


@pytest.mark.parametrize("exchange", [True, False])
def test_all_of_a_folder_is_on_the_disk_before_it_has_its_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Order of the calls that a power cut could come between."""
    target = tmp_path / "name"
    take_name(made(tmp_path, "one"), target)
    new = made(tmp_path, "two")
    (new / "deep" / "er").mkdir(parents=True)
    (new / "deep" / "er" / "b").write_text("b")
    named = {path.stat().st_ino: path.name for path in [tmp_path, new, *new.rglob("*")]}
    calls: list[str] = []
    sync, rename, swap = os.fsync, os.rename, folders._exchanged

    def fsync(descriptor: int) -> None:
        calls.append(named[os.fstat(descriptor).st_ino])
        sync(descriptor)

    def renamed(old: Path, name: Path) -> None:
        rename(old, name)  # the name is taken where this returns
        calls.append("the name")

    def exchanged(one: Path, other: Path) -> bool:
        calls.append("the name")
        return exchange and swap(one, other)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(folders, "_exchanged", exchanged)
    take_name(new, target)
    first, last = calls.index("the name"), len(calls) - calls[::-1].index("the name")
    assert sorted(calls[:first]) == sorted([new.name, "a", "deep", "er", "b"])
    assert calls[last:] == [tmp_path.name]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    assert take_name(made(tmp_path, "one"), tmp_path / "name") is None
    assert (tmp_path / "name" / "a").read_text() == "one"


def test_where_the_new_one_cannot_take_the_name_the_earlier_one_has_it_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_exchange(monkeypatch)
    target = tmp_path / "name"
    take_name(made(tmp_path, "one"), target)
    new, real = made(tmp_path, "two"), os.rename

    def rename(old: Path, name: Path) -> None:
        if Path(old) == new and not target.exists():
            raise OSError("no more names")
        real(old, name)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="no more names"):
        take_name(new, target)
    assert (target / "a").read_text() == "one"


def test_a_reader_finds_one_of_the_two_at_any_moment(tmp_path: Path) -> None:
    if folders._renameat2() is None:
        pytest.skip("the C library has no renameat2: names cannot be exchanged")
    target = tmp_path / "name"
    take_name(made(tmp_path, "0"), target)
    seen, done = set[str](), threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add((target / "a").read_text())

    failures = list[BaseException]()

    def guarded() -> None:
        try:
            read()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=guarded)
    reader.start()
    for number in range(1, 200):
        # Exchanged folders stay: one that is deleted while its file is opened is another matter.
        take_name(made(tmp_path, str(number)), target)
    done.set()
    reader.join()
    assert not failures
    assert seen <= {str(number) for number in range(200)}


def test_a_free_name_is_one_that_nothing_has(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        names.append(free_name(tmp_path / "p"))
        names[-1].mkdir()
    assert [name.name for name in names] == ["p.previous", "p.previous-2", "p.previous-3"]
