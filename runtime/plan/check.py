"""Check values against the types, ranges and choices that their dataclass's fields declare."""

import dataclasses
import functools
import math
import types
import typing
from typing import Any, Literal, cast

from gnnplan.runtime.errors import did_you_mean
from gnnplan.runtime.plan.setting import Range, own_fields

_ANY = {
    int: Range(least=-math.inf, most=math.inf),
    float: Range(least=-math.inf, most=math.inf, whole=False),
}
_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "True or False"),
    str: ("a text", "texts"),
}
"""Words for one and for several values of a type."""


def fits(hint: Any, value: Any, wanted: Range | None = None) -> bool:
    """Return whether a value is of a declared type; a number must be finite, and in its range.

    >>> fits(list[int], [5, -1]), fits(list[int], [5, True]), fits(float | None, math.nan)
    (True, False, False)
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return any(fits(part, value, wanted) for part in parts)
    if origin is Literal:
        return any(isinstance(value, type(part)) and value == part for part in parts)
    if origin is list:
        return isinstance(value, list) and all(fits(parts[0], each) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(parts[0], name) and fits(parts[1], each) for name, each in value.items()
        )
    if hint in _ANY:
        return (wanted or _ANY[hint]).has(value)
    return isinstance(value, hint)


def find_fault(owner: Any) -> str:
    """Say in a line which value of a dataclass is of another type than its field declares.

    A number outside its setting's range and a word that is no choice are faults too. Dataclasses
    in its fields are looked through. Empty: there is no fault.
    """
    settings = {each.name: each for each in own_fields(type(owner))}
    for name, hint in _declared_types(type(owner)).items():
        found, declared = getattr(owner, name), settings.get(name)
        wanted = None if declared is None else declared.setting.range
        if not fits(hint, found, wanted):
            line = f"{name.replace('_', ' ')}: expected {_words(hint, wanted)}, found "
            line += _shown(found)
            if declared is None:
                return line
            if isinstance(found, str):
                line += did_you_mean(found, declared.choices)
            flag = "it" if declared.setting.surface == "service" else declared.flag
            return f"{line}; correct {flag}"
        for inner in cast("list[Any]", found) if isinstance(found, list) else [found]:
            if dataclasses.is_dataclass(inner) and (fault := find_fault(inner)):
                return fault
    return ""


@functools.cache
def _declared_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}


def _words(hint: Any, wanted: Range | None) -> str:
    """Say what a value of a type is."""
    origin = typing.get_origin(hint)
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    if origin is Literal:
        return f"one of {', '.join(parts)}"
    if origin is types.UnionType:
        return " or ".join(_words(part, wanted) for part in parts)
    if origin is list:
        return f"a list of {_plural(parts[0])}"
    if origin is dict:
        return f"a dict of {_plural(parts[1])} by name"
    return str(wanted) if wanted else _WORDS.get(hint, (f"a {hint.__name__}", ""))[0]


def _plural(hint: Any) -> str:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join(map(_plural, parts))
    if typing.get_origin(hint) is list:
        return f"lists of {_plural(parts[0])}"
    return _WORDS.get(hint, ("", f"{hint.__name__} objects"))[1]


def _shown(value: Any) -> str:
    """Write a value of any kind for one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # a whole number of more digits than Python writes
        return "a value of too many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
