"""The codec decodes what it encodes and names the path of every fault."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest

from gnnplan.runtime import codec


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    n: int
    f: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    many: list[Inner] = field(default_factory=list)
    named: dict[str, float] = field(default_factory=dict)
    maybe: int | None = None
    colour: Colour = Colour.RED
    pair: tuple[int, str] = (1, "a")


def test_values_round_trip():
    value = Outer(name="x", inner=Inner(3), many=[Inner(1, 2.0)], named={"a": 1.5}, maybe=7)
    assert codec.decode(Outer, codec.to_plain(value)) == value


def test_text_is_canonical_and_numpy_scalars_are_plain():
    assert codec.dumps({"b": np.float64(1.5), "a": np.int32(2)}) == '{\n "a": 2,\n "b": 1.5\n}\n'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, "$.name: expected str"),
        ({"inner": {"n": True}}, "$.inner.n: expected int"),
        ({"inner": {}}, "field 'n' of Inner is missing"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"many": [{"n": "q"}]}, "$.many[0].n"),
        ({"named": {"k": "v"}}, "$.named.k"),
        ({"colour": "blue"}, "expected one of red"),
        ({"pair": [1]}, "expected 2 items"),
        ({"inner": []}, "expected an object"),
        ({"inner": {"n": 1, "f": float("nan")}}, "finite"),
    ],
)
def test_faults_name_their_path(change: dict, words: str):
    document = {"name": "x", "inner": {"n": 1}} | change
    with pytest.raises(codec.CodecError) as caught:
        codec.decode(Outer, document)
    assert words in str(caught.value)


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    codec.write_text_atomically(path, "old")

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        codec.write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("1" * 5000, "expected JSON"),
        (b"\xff\xfe\xfa", "expected JSON"),
        ("{", "expected JSON"),
    ],
)
def test_text_that_is_no_json_is_one_error_of_one_line(text: str | bytes, words: str):
    with pytest.raises(codec.CodecError, match=words) as caught:
        codec.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"named": {"k": 10**400}}, "finite"),
        ({"name": 10**400}, "an integer of 1329 bits"),
        ({"name": ["x"] * 10_000}, "a list of 10000"),
        ({"named": {"a\nb" * 100: "v"}}, "expected float"),
        ({"y\n" * 1000: 1}, "unknown field"),
    ],
)
def test_faults_of_any_size_are_told_in_one_short_line(change: dict, words: str):
    document = {"name": "x", "inner": {"n": 1}} | change
    with pytest.raises(codec.CodecError, match=words) as caught:
        codec.decode(Outer, document)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
