"""Read and write sizes, counts and settings as people and flags do, and report progress."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.settings import SamplerChoice
from gnnplan.runtime.plan.setting import SettingField, setting_fields

T = TypeVar("T")
DECIMAL_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
UNITS = {**DECIMAL_UNITS, **BINARY_UNITS}


def parse_bytes(text: str | None, option: str) -> int | None:
    """Parse a number of bytes such as 1500000, 512MiB, 8GB or 1.5g.

    Raises:
        SettingsError: not a size, or negative.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    size = float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else math.inf
    if not math.isfinite(size):
        raise SettingsError(f"{option}: expected a size such as 512MiB or 8GB, found {text!r:.60}")
    return int(size)


def scale_number(value: str, old: float, key: str, *, size: bool) -> float:
    """Read a new number from xF (a factor of the old one) or from a plain number or size.

    Raises:
        SettingsError: it is none, or not above 0.
    """
    try:
        if value.startswith("x"):
            found = old * float(value[1:])
        else:
            found = float(parse_bytes(value, f"--set {key}") or 0) if size else float(value)
    except ValueError:
        found = float("nan")
    if not 0 < found < float("inf"):
        what = "a size such as 16GiB" if size else "a number"
        raise SettingsError(f"--set {key}: expected {what} or a factor such as x2, found {value!r}")
    return found


def counted(number: int, word: str) -> str:
    """Return a number with its noun, in the plural where it is not one.

    >>> counted(1, "host"), counted(2, "epoch"), counted(2, "batch")
    ('1 host', '2 epochs', '2 batches')
    """
    many = "es" if word.endswith("tch") else "s"
    return f"{number} {word}{'' if number == 1 else many}"


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them: rank2 before rank10.

    >>> sorted(["rank10", "rank2", "host0"], key=by_number)
    ['host0', 'rank2', 'rank10']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


def in_order(values: Mapping[str, T]) -> list[tuple[str, T]]:
    """Return items sorted by their names, as `by_number` sorts."""
    return sorted(values.items(), key=lambda item: by_number(item[0]))


SAMPLER = "sampler"
"""Setting whose text has parameters too, and whose flag may be repeated."""
AUTO = "auto"
"""Text of a setting that is unset."""
YES_NO = ("yes", "no")
"""Texts of true and false in a form."""


def is_repeated(field: SettingField) -> bool:
    """Return whether a flag may be given several times."""
    return field.name == SAMPLER or field.hint == dict[str, list[int]]


def is_text(field: SettingField) -> bool:
    """Return whether a flag is read as text here, and not by the command line itself."""
    return is_repeated(field) or _takes_auto(field) or field.hint == list[int]


def _takes_auto(field: SettingField) -> bool:
    """Return whether `auto` leaves a setting unset; a name or a path is taken as it is."""
    return field.optional and field.hint != str | None


def _flag_of(field: SettingField) -> str:
    return field.flag


def flag_help(field: SettingField) -> str:
    """Return the help of a flag."""
    said, unset = field.setting, field.setting.unset
    word = AUTO if _takes_auto(field) else "left out"
    parts = [said.help.rstrip("."), said.how, f"{word}: {unset}" if unset else ""]
    return f"{'; '.join(part for part in parts if part)}."


def default_text(field: SettingField) -> str:
    """Return the text of the default; empty where there is none."""
    default = field.default
    if isinstance(default, bool):
        return YES_NO[not default]
    if isinstance(default, list | dict):
        return ",".join(map(str, cast("list[Any]", default)))
    return "" if default is None else str(default)


def read_texts(
    kind: type, texts: Mapping[str, Any], *, name_of: Callable[[SettingField], str] = _flag_of
) -> dict[str, Any]:
    """Return values of settings by name, from the texts of those that were given.

    Args:
        kind: the dataclass that declares them.
        texts: by name; None and values that are no text are left as they are.
        name_of: returns a field's name in errors; by default its flag.

    Raises:
        SettingsError: a text is no number, size or list of such; the line names the field.
    """
    found: dict[str, Any] = {}
    for each in setting_fields(kind):
        if each.name not in texts:
            continue
        text = texts[each.name]
        if is_repeated(each) and isinstance(text, str):
            text = text.split()  # a form has one field for all of them
        if each.name == SAMPLER:
            found |= _read_samplers(text or [AUTO], name_of(each))
        elif is_repeated(each):
            found[each.name] = _read_named(text or [], name_of(each))
        else:
            found[each.name] = _read(each, text, name_of(each)) if isinstance(text, str) else text
    return found


def _read(field: SettingField, text: str, name: str) -> Any:
    if _takes_auto(field) and text.strip() == AUTO:
        return None
    if field.name.endswith("_bytes"):
        return parse_bytes(text, name)
    if field.hint in (list[int], list[int] | None):
        return parse_integers(text, name)
    if field.hint is bool and text in YES_NO:
        return text == YES_NO[0]
    kind = {int: int, int | None: int, float: float, float | None: float}.get(field.hint)
    if kind is None:
        return text
    try:
        return kind(text.strip())
    except ValueError:
        number = "a whole number" if kind is int else "a number"
        wanted = f"{number} or {AUTO}" if field.optional else number
        raise SettingsError(f"{name}: expected {wanted}, found {text[:40]!r}") from None


def parse_integers(text: str, name: str) -> list[int]:
    """Read comma-separated integers, such as fan-outs 15,10,5.

    Raises:
        SettingsError: the text is something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(
            f"{name}: expected whole numbers separated by commas, such as 15,10, found {text!r}"
        ) from None


def _read_named(texts: list[str], name: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for text in texts:
        key, equals, numbers = text.partition("=")
        if not equals or not key or key in found:
            raise SettingsError(f"{name}: expected NAME=5,3 once per edge type, found {text!r}")
        found[key] = parse_integers(numbers, name)
    return found


def _read_samplers(texts: list[str], name: str) -> dict[str, Any]:
    first, *others = [parse_sampler(text, name) for text in texts]
    return {
        SAMPLER: first.name,
        "sampler_parameters": first.parameters,
        "other_samplers": others,
    }


def parse_sampler(text: str, name: str) -> SamplerChoice:
    """Read a sampler's name and parameters from NAME or NAME:key=value,key=value.

    Raises:
        SettingsError: a parameter is not key=value.
    """
    sampler, _, rest = text.partition(":")
    parameters: dict[str, float | str] = {}
    for part in re.split(r",(?!\s*\d+\s*(?:,|$))", rest) if rest else []:  # sizes=512,256 is one
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise SettingsError(
                f"{name}: expected NAME or NAME:key=value,key=value, found {text!r}"
            )
        parameters[key.strip()] = _number_or_text(value.strip())
    return SamplerChoice(name=sampler, parameters=parameters)


def _number_or_text(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text  # JSON has no others; samplers read the text


def seconds_text(seconds: float) -> str:
    """Write seconds in s, ms or us.

    >>> seconds_text(0.0), seconds_text(4.2e-6), seconds_text(0.0123), seconds_text(75.0)
    ('0 s', '4.2 us', '12.3 ms', '75.0 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 1e-6:.1f} us"


Progress = Callable[[str, float], None]
"""Called with what is going on and the share that is done."""


def silent(words: str, share: float) -> None:
    """Report to nobody."""
    del words, share


def portion(progress: Progress, first: float, last: float) -> Progress:
    """Return the progress of a part that goes from `first` to `last` of the whole.

    >>> portion(lambda words, share: print(words, share), 0.5, 1.0)("half of the second half", 0.5)
    half of the second half 0.75
    """

    def say(words: str, share: float) -> None:
        progress(words, first + (last - first) * min(1.0, max(0.0, share)))

    return say


def onward(progress: Progress) -> Progress:
    """Return progress whose share never falls.

    >>> say = onward(lambda words, share: print(words, share))
    >>> say("one rank", 0.4), say("two ranks", 0.1)
    one rank 0.4
    two ranks 0.4
    (None, None)
    """
    most = 0.0

    def say(words: str, share: float) -> None:
        nonlocal most
        most = max(most, share)
        progress(words, most)

    return say
