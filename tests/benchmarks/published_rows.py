"""Read a file of published figures, one a row, and what each of them is."""

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = (
    "id", "system", "quantity", "value", "unit", "hardware", "gpus", "hosts", "dataset", "model",
    "layers", "hidden", "fanouts", "batch", "cache", "notes", "source",
)  # fmt: skip
SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
SECONDS = {
    "s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "minutes": 60.0,
    "h": 3600.0, "hours": 3600.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the file, as printed."""

    id: str
    system: str
    quantity: str
    value: float
    """NaN where there is no number."""
    unit: str
    hardware: str
    gpus: int
    hosts: int
    dataset: str
    model: str
    layers: int
    """0 where it is not stated."""
    hidden: int
    fanouts: str
    batch: str
    cache: str
    notes: str
    source: str

    @property
    def words(self) -> str:
        """All that says how the system was set, in lower case."""
        return " ".join((self.system, self.cache, self.notes, self.fanouts)).lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a row's figure is."""

    kind: str
    """time, rate, hit, miss, inputs, remote, touched, memory; empty: none that is predicted."""
    stages: tuple[str, ...] = ("sample", "features", "compute")
    """Of a time: what it takes in."""
    per: str = "epoch"
    cache: str = "gpu"
    """Of a hit or miss rate: whose."""
    scale: float = 1.0
    """Factor from the unit of the row to seconds, shares or counts."""
    reason: str = ""


def read_rows(path: Path) -> list[Row]:
    """Read a file of published figures; ValueError where a column is missing."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    missing = [name for name in COLUMNS if lines and name not in lines[0]]
    if missing:
        raise ValueError(f"{path}: expected columns {', '.join(COLUMNS)}, found no {missing[0]}")
    return [_row(line) for line in lines]


def _row(line: dict[str, str]) -> Row:
    text = {name: (line.get(name) or "").strip() for name in COLUMNS}
    number = first_number(text["value"])
    whole = {name: int(first_number(text[name]) or 0) for name in ("gpus", "hosts", "layers")}
    whole["hidden"] = int(first_number(text["hidden"]) or 0)
    read: dict[str, Any] = {
        **{name: text[name] for name in COLUMNS if name not in whole and name != "value"},
        **whole,
        "value": math.nan if number is None else number,
    }
    return Row(**read)


def first_number(text: str) -> float | None:
    """Find the first number of a text, with its thousands and its scale.

    >>> first_number("1,178 steps"), first_number("4.5M rows"), first_number("none")
    (1178.0, 4500000.0, None)
    """
    found = re.search(r"(\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*([kKMBG](?![A-Za-z]))?", text)
    if found is None:
        return None
    value = float(found[1].replace(",", "").rstrip("."))
    return value * SCALES[found[2].lower()] if found[2] else value


STAGES = (
    (r"\bdata load|of loading|loader|batch prep", ("sample", "features")),
    (r"sampl", ("sample",)),
    (r"extract|copy|feature|gather|slic|transfer|\bload\b", ("features",)),
    (r"\btrainer epoch", ("features", "compute")),
    (r"^train (?:seconds|time)|train stage|forward|backward|compute", ("compute",)),
    (r"communicat|exchange", ("exchange",)),
)
"""What part of a step a time takes in, by the first of these words that it holds."""
OUTSIDE = (
    (r"partition", "partitioning by another system is not modelled"),
    (r"accura|score|\bf1\b|loss|\bauc\b|\bmrr\b", "a score follows from training on the data set"),
    (r"speed-?up|\bratio\b|faster", "a ratio of two runs, of which each is a row of its own"),
    (r"preprocess|compil|\bpack", "preparation before training is not modelled"),
    (r"time to (?:train|accura|conver)", "how many epochs it took is not stated"),
    (r"(?<!without )(?:evaluat|validat|inference)", "what follows training is not modelled"),
)


def asked_of(row: Row) -> Asked:
    """Read what the figure is from quantity and unit."""
    text, unit = row.quantity.lower(), row.unit.lower().strip()
    if math.isnan(row.value):
        return Asked(kind="", reason="the row has no number")
    for pattern, reason in OUTSIDE:
        if re.search(pattern, text):
            return Asked(kind="", reason=reason)
    share = 0.01 if unit in ("%", "percent") else 1.0
    whose = "host" if re.search(r"cpu|host", text) else "gpu"
    if re.search(r"\bmiss", text):
        return Asked(kind="miss", cache=whose, scale=share)
    if re.search(r"\bhit", text):
        return Asked(kind="hit", cache=whose, scale=share)
    if re.search(r"remote|communicated (?:vert|nod)", text):
        return Asked(kind="remote", scale=_unit_scale(unit))
    if re.search(r"(?:touched|distinct|unique) (?:nodes|vertices|share)", text):
        return Asked(kind="touched", scale=share)
    if re.search(r"input (?:nodes|vertices)|(?:nodes|vertices) per batch", text):
        return Asked(kind="inputs", scale=_unit_scale(unit))
    if unit in ("mib", "gib", "mb", "gb") and "memory" in text:
        sizes = {"mib": 2**20, "gib": 2**30, "mb": 1e6, "gb": 1e9}
        return Asked(kind="memory", scale=float(sizes[unit]))
    per = (
        "step" if re.search(r"per (?:mini-?)?(?:batch|step|iter)|\biter|\bstep", text) else "epoch"
    )
    stages = _stages(text)
    if unit in SECONDS:
        return Asked(kind="time", stages=stages, per=per, scale=SECONDS[unit])
    if unit.endswith(("/s", "per second", "it/s", "seps")):
        return Asked(kind="rate", stages=stages, per=_counted(unit), scale=_unit_scale(unit))
    return Asked(kind="", reason=f"quantity {row.quantity!r} in {row.unit!r} is none that is known")


def _stages(text: str) -> tuple[str, ...]:
    found = [(m.start(), parts) for pattern, parts in STAGES if (m := re.search(pattern, text))]
    return min(found)[1] if found else ("sample", "features", "compute", "exchange")


def _counted(unit: str) -> str:
    for word, per in (("edge", "edges"), ("seps", "edges"), ("b/s", "bytes"), ("node", "seeds"),
                      ("seed", "seeds"), ("sample", "seeds")):  # fmt: skip
        if word in unit:
            return per
    return "step"


def _unit_scale(unit: str) -> float:
    found = re.match(r"(k|m|g|b)(?=[a-z/ ])(?!i?ter)", unit)
    return SCALES[found[1]] if found and not unit.startswith(("batch", "byte", "b/")) else 1.0


def paper_of(source: str) -> str:
    """Name the publication that a source is part of: what is left out together.

    A repository is one, its rounds together; of a repository of many examples, each example and
    each thread is one.

    >>> paper_of("github a/b_results_v4.0 X/results/Y"), paper_of("github d/e PR #12 (x)")
    ('a/b_results', 'd/e #12')
    >>> paper_of("github d/e examples/f/g/README.md")
    'd/e examples/f/g'
    """
    found = re.search(r"([\w.-]+/[\w.-]+)\s*(.*)", source.replace("github ", "", 1))
    if found is None:
        return source or "unnamed"
    name, rest = re.sub(r"_v\d[\d.]*$", "", found[1]), found[2]
    if thread := re.search(r"#(\d+)", rest):
        return f"{name} #{thread[1]}"
    if rest.startswith("examples/"):
        return f"{name} {rest.split()[0].rpartition('/')[0]}"
    return name
