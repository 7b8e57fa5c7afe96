"""Which test files come nearest to a module: by name, then by imports between."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.mutation.draw import PRODUCT, product_files

Imports = dict[str, frozenset[str]]
"""By module: the modules that it imports, or starts or looks up by name."""


def read_imports(root: Path) -> Imports:
    """Imports among the modules of the product and of the tests."""
    tests = sorted((root / "tests").rglob("*.py"))
    paths = {name_of(root, path): path for path in [*product_files(root), *tests]}
    return {
        name: frozenset(_imported(path, frozenset(paths))) - {name} for name, path in paths.items()
    }


def name_of(root: Path, path: Path) -> str:
    """Dotted name of a module."""
    parts = path.relative_to(root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"gnnplan.{name}" if parts[0] in PRODUCT else name


def _imported(path: Path, known: frozenset[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from (name for name in (whole, node.module) if name in known)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # "-m", "gnnplan.runtime.worker" and the like; a package stands for its __main__.
            if node.value in known and node.value not in PRODUCT:
                yield node.value
            elif f"{node.value}.__main__" in known:
                yield f"{node.value}.__main__"


def users_of(imports: Imports) -> dict[str, list[str]]:
    """By module: those that import it."""
    users: dict[str, list[str]] = {name: [] for name in imports}
    for name in sorted(imports):
        for other in imports[name]:
            users[other].append(name)
    return users


def nearest_tests(imports: Imports, module: str) -> list[str]:
    """Test modules that reach a module, nearest first.

    First those that are named after it, then by the number of imports between; of equally near ones
    those whose folder is most like the module's. Fixtures of a folder belong to its tests.
    """
    users, distance, layer = users_of(imports), {module: 0}, [module]
    while layer:
        further: list[str] = []
        for name in layer:
            for user in [*users[name], *_fixture_users(imports, name)]:
                if user not in distance:
                    distance[user] = distance[name] + 1
                    further.append(user)
        layer = further
    tests = [name for name in distance if name.rsplit(".", 1)[-1].startswith("test_")]
    return sorted(tests, key=lambda test: _order(test, module, distance[test]))


def _order(test: str, module: str, distance: int) -> tuple[bool, int, int, str]:
    *folders, name = module.removeprefix("gnnplan.").split(".")
    own = test.removeprefix("tests.").split(".")
    named = own[-1] == f"test_{name}" and own[:1] == folders[:1]
    alike = sum(1 for one, other in zip(folders, own, strict=False) if one == other)
    return not named, distance, -alike, test


def _fixture_users(imports: Imports, name: str) -> list[str]:
    """Tests under a conftest's folder; the one of all tests says nothing about any."""
    if not name.endswith(".conftest") or name == "tests.conftest":
        return []
    return [test for test in sorted(imports) if test.startswith(name.removesuffix("conftest"))]
