"""Flags that are made of the fields of a dataclass of settings."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from planner.options import AUTO, default_text, flag_help, is_repeated, is_text, read_texts
from runtime.plan.setting import SettingField, make_from, setting_fields

Answer = TypeVar("Answer")
Make = Callable[[Mapping[str, Any]], Any]


def with_options(**makers: Make | None) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Let a command take each field of some of its parameters as an option.

    Args:
        **makers: by parameter, what makes it of its fields' values (those that were not given are
            missing); None: its own class does.
    """

    def decorate(command: Callable[..., Answer]) -> Callable[..., Answer]:
        hints = get_type_hints(command, include_extras=True)

        @functools.wraps(command)
        def run(**given: Any) -> Answer:
            for name, maker in makers.items():
                kind = hints[name]
                texts = {each.name: given.pop(each.name) for each in option_fields(kind)}
                values = read_texts(kind, {k: v for k, v in texts.items() if v is not None})
                given[name] = make_from(kind, values) if maker is None else maker(values)
            return command(**given)

        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            if each.name in makers:
                parameters += [_parameter(field) for field in option_fields(hints[each.name])]
            else:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue] - what inspect reads
        return run

    return decorate


def option_fields(kind: type) -> Iterator[SettingField]:
    """Fields that are flags."""
    return (each for each in setting_fields(kind) if each.setting.surface != "service")


def _parameter(field: SettingField) -> inspect.Parameter:
    flag, default, hint = field.flag, field.default, field.hint
    if is_repeated(field):
        hint, default = list[str] | None, None
    elif is_text(field):
        hint = str
        default = default_text(field) or AUTO
    elif default is None:
        hint = hint | None
    elif default is True:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, typer.Option(flag, help=flag_help(field))],
    )
