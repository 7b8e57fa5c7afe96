"""Pages that tell how: their blocks of commands, and what they name that does not exist.

Fenced blocks say what they are: `sh` is run, `sh host N` at the same time as its neighbours of that
kind, `python` is run, `python NAME` is a file of that name. Other fences are only shown.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("gnnplan", "gnnplan-serve")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block."""

    kind: str
    """sh | host | python | file | shown."""
    name: str
    """Number of the host, or name of the file."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What there is to be named."""

    root: Path
    verbs: dict[str, set[str]]
    """Flags of each command, such as `graph import`."""
    serve: set[str]
    """Flags of gnnplan-serve."""
    routes: set[str]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    for label, text in FENCE.findall(page):
        words = label.split()
        kind, name = "shown", ""
        if words[:1] == ["sh"]:
            kind, name = ("host", words[2]) if words[1:2] == ["host"] else ("sh", "")
        elif words[:1] == ["python"]:
            kind, name = ("file", words[1]) if len(words) > 1 else ("python", "")
        found.append(Block(kind=kind, name=name, text=text))
    return found


def unknown(page: str, folder: Path, known: Known) -> list[str]:
    """What a page names that does not exist: commands, flags, files, modules, routes."""
    found: list[str] = []
    for line in command_lines(page):
        found += _of_command(line, known)
    prose = FENCE.sub("", page)
    every = set().union(*known.verbs.values(), known.serve) | {"--json", "--help", "--debug"}
    for words in re.findall(r"`([^`\n]+)`", prose):
        if words.startswith("--"):
            found += [words] if words.split()[0].split("=")[0] not in every else []
        elif words.split()[0] in COMMANDS:
            found += _of_command(words, known)
        elif words.startswith("python -m "):
            module = words.split()[2]
            found += [module] if importlib.util.find_spec(module) is None else []
        elif re.fullmatch(r"[\w./-]+/[\w.-]+\.(py|md|yaml|json)", words) and "NAME" not in words:
            places = (folder / words, known.root / words)
            found += [words] if not any(place.exists() for place in places) else []
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose)
    found += [link for link in links if not (folder / link).exists()]
    imports = re.findall(r"^(?:from|import) ((?:runtime|planner|api)[\w.]*)", page, re.MULTILINE)
    found += [name for name in imports if importlib.util.find_spec(name) is None]
    found += [route for route in _routes(page) if not _is_route(route, known.routes)]
    return found


def command_lines(page: str) -> list[str]:
    """Lines of shell blocks that begin with a command of ours."""
    lines = [line.strip() for b in blocks(page) if b.kind in ("sh", "host") for line in
             b.text.splitlines()]  # fmt: skip
    return [line for line in lines if line.split()[:1] and line.split()[0] in COMMANDS]


def _of_command(line: str, known: Known) -> list[str]:
    words = shlex.split(line, comments=True)
    flags = [w.split("=")[0] for w in words if w.startswith("--") and w != "--"]
    if words[0] == "gnnplan-serve":
        return [f"{line}: {flag}" for flag in flags if flag not in known.serve]
    if len(words) == 1 or words[1] in ("--install-completion", "--show-completion", "--help"):
        return []
    verb = " ".join(words[1:3]) if " ".join(words[1:3]) in known.verbs else words[1]
    if verb not in known.verbs:
        return [f"{line}: no such command"]
    allowed = known.verbs[verb] | {"--json", "--help", "--debug"}
    return [f"{line}: {flag}" for flag in flags if flag not in allowed]


def _routes(page: str) -> list[str]:
    return re.findall(r"(?<![\w/])/v1/[\w/{}$.-]+|(?<=\d)/v1/[\w/{}$.-]+", page)


def _is_route(text: str, routes: Iterable[str]) -> bool:
    """Whether a path is one of the service's; `$ID` and `{plan}` stand for any part."""
    parts = text.rstrip(".").split("/")
    for route in routes:
        theirs = route.split("/")
        if len(theirs) == len(parts) and all(
            a == b or b.startswith("{") for a, b in zip(parts, theirs, strict=True)
        ):
            return True
    return False


def verbs_of(command: Any) -> dict[str, set[str]]:
    """Every command of a typer application and its flags."""
    found: dict[str, set[str]] = {}

    def walk(each: Any, path: str) -> None:
        children = getattr(each, "commands", None)
        if children is None:
            options = [p for p in each.params if p.param_type_name == "option"]
            names = {o for p in options for o in (*p.opts, *p.secondary_opts)}
            found[path] = {name for name in names if name.startswith("--")}
            return
        for name, child in children.items():
            walk(child, f"{path} {name}".strip())

    walk(command, "")
    return found
