"""The oldest versions that are allowed are those that `make test-versions` runs."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, Version]:
    """Versions that a file of constraints names."""
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), re.M)
    return {canonicalize_name(package): Version(version) for package, version in lines}


def bounds() -> list[tuple[str, Version]]:
    """Lower bounds of what is needed to run and to test."""
    wanted = map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])
    return [
        (canonicalize_name(each.name), Version(part.version))
        for each in wanted
        for part in each.specifier
        if part.operator in (">=", "==")
    ]


def test_the_oldest_versions_that_are_run_are_the_lower_bounds() -> None:
    assert [(name, pins("constraints-oldest.txt")[name]) for name, _ in bounds()] == bounds()


def test_extras_allow_no_older_versions_than_the_tests() -> None:
    tested = dict(bounds())
    for extra in ("gpu", "parquet", "metis", "postgres"):
        for text in PROJECT["optional-dependencies"][extra]:
            (part,) = Requirement(text).specifier
            assert Version(part.version) == tested[canonicalize_name(Requirement(text).name)]


def test_the_versions_of_every_day_are_allowed() -> None:
    pinned = pins("constraints.txt")
    for name, least in bounds():
        assert pinned[name] >= least
