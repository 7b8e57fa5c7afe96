"""Flags that are made of the fields of a dataclass of settings."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer

from gnnplan.planner.settings import AUTO, default_text, flag_help, is_repeated, is_text, read_texts
from gnnplan.runtime.plan.setting import SettingField, make_from, setting_fields

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
                texts = {each.name: given.pop(each.name) for each in _parameters(kind)}
                values = read_texts(kind, {k: v for k, v in texts.items() if v is not None})
                if maker is not None:
                    given[name] = maker(values)
                elif setting_fields(kind):
                    given[name] = make_from(kind, values)
                else:
                    given[name] = kind(**texts)
            return command(**given)

        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            if each.name in makers:
                parameters += _parameters(hints[each.name])
            else:
                parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue] - what inspect reads
        return run

    return decorate


def option_fields(kind: type) -> Iterator[SettingField]:
    """Fields that are flags."""
    return (each for each in setting_fields(kind) if each.setting.surface != "service")


def _parameters(kind: type) -> list[inspect.Parameter]:
    """Parameters of a command for the fields of a dataclass: settings, or typer's own options."""
    if settings := [_parameter(each) for each in option_fields(kind)]:
        return settings
    declared = inspect.signature(kind, eval_str=True).parameters.values()
    return [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in declared]


def flag_words(options: object) -> list[str]:
    """The flags that mean some settings; a setting that is None or False needs none.

    >>> from gnnplan.runtime.launch.config import TrainOptions
    >>> flag_words(TrainOptions(epochs=3, resume=True, eval_fanouts=[5, 3]))[:3]
    ['--epochs=3', '--resume', '--eval-fanouts=5,3']
    """
    words = list[str]()
    for field in option_fields(type(options)):
        value = getattr(options, field.name)
        if isinstance(value, bool):
            words += [field.flag] * value
        elif isinstance(value, list):
            words.append(f"{field.flag}={','.join(map(str, cast('list[int]', value)))}")
        elif value is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            words.append(f"{field.flag}={shown}")
    return words


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
