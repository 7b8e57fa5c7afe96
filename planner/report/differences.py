"""Two plans side by side for people: what is alike is said once, what is the same is left out."""

import re
from dataclasses import dataclass
from typing import Any, cast

from planner.diff import NumberPair, diff
from runtime.plan import Plan

CLOSE = 0.005
"""Numbers nearer than this share are counted, not listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberRow:
    """Predicted numbers of both plans; several names where the numbers are equal."""

    name: str
    unit: str
    a: float
    """0 where plan A has none."""
    b: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionRow:
    """One field of both plans, in words."""

    field: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """What a page shows of two plans."""

    numbers: list[NumberRow]
    close: int
    """Numbers that differ by less than `CLOSE`."""
    decisions: list[DecisionRow]
    arrays: list[str]


def differences(a: Plan, b: Plan) -> Differences:
    """What two plans decide and predict differently."""
    found = diff(a, b)
    far = [pair for pair in found.numbers if abs(pair.a - pair.b) > CLOSE * max(pair.a, pair.b)]
    ranks = DecisionRow(field="ranks", a=ranks_text(a), b=ranks_text(b))
    told = ranks.a != ranks.b
    decisions = [ranks] if told else []
    decisions += [
        DecisionRow(field=each.field, a=value_text(each.a), b=value_text(each.b))
        for each in found.decisions
        if not (told and each.field.startswith("strategy.devices."))
    ]
    return Differences(
        numbers=_together(far),
        close=len(found.numbers) - len(far),
        decisions=decisions,
        arrays=numbered(found.arrays),
    )


def ranks_text(plan: Plan) -> str:
    """The ranks and the memories that they are at.

    Equal memories are named once: four ranks of one host are "4 ranks at host0".
    """
    devices = plan.strategy.devices
    places = list(dict.fromkeys(device.memory for device in devices))
    return f"{len(devices)} rank{'s' if len(devices) > 1 else ''} at {', '.join(places)}"


def value_text(value: Any) -> str:
    """A plan's value in words.

    >>> value_text(None), value_text([0, 0, 0, 0]), value_text([15, 10]), value_text(True)
    ('not there', '4 times 0', '15, 10', 'yes')
    """
    if value is None:
        return "not there"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        items = [value_text(each) for each in cast("list[Any]", value)]
        if len(items) > 2 and len(set(items)) == 1:
            return f"{len(items)} times {items[0]}"
        return ", ".join(items) if items else "none"
    return str(value)


def numbered(names: list[str]) -> list[str]:
    """Names that differ in their last number alone, told as one.

    >>> numbered(["own_4", "own_5", "own_6", "partition"])
    ['own_4 to own_6', 'partition']
    """
    out: list[list[str]] = []
    for name in names:
        before = re.fullmatch(r"(.*\D)(\d+)", out[-1][-1]) if out else None
        now = re.fullmatch(r"(.*\D)(\d+)", name)
        if before and now and before[1] == now[1] and int(now[2]) == int(before[2]) + 1:
            out[-1].append(name)
        else:
            out.append([name])
    return [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in out]


def _together(pairs: list[NumberPair]) -> list[NumberRow]:
    """Equal numbers of one kind in one row, in the order in which they come first."""
    rows: dict[tuple[str, str, float, float], list[str]] = {}
    for pair in pairs:
        kind, _, name = pair.name.partition(" ")
        rows.setdefault((kind, pair.unit, pair.a, pair.b), []).append(name)
    return [
        NumberRow(name=f"{kind} {', '.join(numbered(names))}".strip(), unit=unit, a=a, b=b)
        for (kind, unit, a, b), names in rows.items()
    ]
