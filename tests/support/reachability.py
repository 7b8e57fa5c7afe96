"""What the product's entry points reach, by names: nothing is imported or run.

A definition is a function, a class or a method. Reached code reaches what its names stand for,
through imports; every method of a reached class that has the name of an attribute it reads; and
modules that it imports, or names in a string such as "gnnplan.runtime.worker". Doubt counts as
reached: what is found unreachable has no caller under any name.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

MODULE_NAME = re.compile(r"gnnplan\.(?:api|planner|runtime)(?:\.\w+)+(?::\w+)?")
PROGRAM = re.compile(r"from (gnnplan[\w.]*) import (\w+)")
"""In a string: what another interpreter is to run."""
PASSIVE_BASES = {
    "ABC", "Enum", "Exception", "Generic", "IntEnum", "NamedTuple", "Protocol", "RuntimeError",
    "StrEnum", "ValueError", "object",
}  # fmt: skip
"""Bases from elsewhere that call no method of a class by its name."""
PASSIVE_DECORATORS = {
    "abstractmethod", "asynccontextmanager", "cache", "cached_property", "classmethod",
    "contextmanager", "dataclass", "getter", "intrinsic", "jit", "kernel", "lru_cache", "njit",
    "property", "runtime_checkable", "setter", "staticmethod", "total_ordering", "unique",
    "vectorize", "wraps",
}  # fmt: skip
"""Any other decorator hands what it stands on to somebody: a command, a route, an overload."""

Key = tuple[str, str]
"""A module and a name in it; the name is empty for the module's own statements, and has a dot for
a method."""


@dataclass(kw_only=True)
class Uses:
    """What some code mentions."""

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    chains: set[tuple[str, str]] = field(default_factory=set)
    """name.attribute"""
    passed: set[str] = field(default_factory=set)
    """Names that stand alone: what they stand for may be asked for anything."""
    texts: set[str] = field(default_factory=set)
    imports: set[Key] = field(default_factory=set)


def uses_of(nodes: Iterable[ast.AST]) -> Uses:
    """Everything that some trees mention, in nested functions too."""
    found, roots = Uses(), set[int]()
    for node in (each for tree in nodes for each in ast.walk(tree)):
        if isinstance(node, ast.Name):
            found.names.add(node.id)
            if id(node) not in roots:
                found.passed.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.attributes.add(node.attr)
            roots.add(id(node.value))
            if (root := _dotted(node.value)) is not None:
                found.chains.add((root, node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.texts.add(node.value)
        elif isinstance(node, ast.Import):
            found.imports |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.imports |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.keyword) and node.arg:
            found.attributes.add(node.arg)
    return found


class Product:
    """Definitions of a set of modules, and which of them are reached.

    Args:
        sources: text by dotted module name.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._trees = {name: ast.parse(text) for name, text in sources.items()}
        self._aliases = {name: dict(_aliases(tree)) for name, tree in self._trees.items()}
        self.definitions: dict[Key, ast.AST] = {}
        """Functions and classes by module and name, methods by Class.method."""
        self._bodies: dict[Key, list[ast.AST]] = {}
        self._handed: dict[str, set[str]] = {}
        for module, tree in self._trees.items():
            self._define(module, tree)
        self._methods: dict[str, set[Key]] = {}
        for module, name in self.definitions:
            if "." in name:
                self._methods.setdefault(name.split(".")[1], set()).add((module, name))

    def unreached(self, roots: Iterable[Key], mentioned: Iterable[str] = ()) -> list[Key]:
        """Definitions that are not reached; of a class that is not, the class alone.

        Args:
            roots: where the product is entered: modules, as (module, ""), and their names. Public
                methods of a class among them are entries too.
            mentioned: attributes that are read by what is no Python, as templates.
        """
        walk = _Walk(self, set(mentioned))
        for module, name in roots:
            walk.add(module, name)
            walk.entries.add((module, name))
        walk.run()
        reached = walk.reached
        return sorted(
            key
            for key in self.definitions
            if key not in reached and ("." not in key[1] or self.class_of(key) in reached)
        )

    def class_of(self, key: Key) -> Key:
        """Of a method."""
        return key[0], key[1].split(".")[0]

    def _define(self, module: str, tree: ast.Module) -> None:
        own = list[ast.AST]()
        self._handed[module] = set()
        for node in _statements(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.append(node)
                continue
            key = (module, node.name)
            self.definitions[key] = node
            if _handed_on(node):
                self._handed[module].add(node.name)
            if not isinstance(node, ast.ClassDef):
                self._bodies[key] = [node]
                continue
            rest = [*node.bases, *node.keywords, *node.decorator_list]
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    method = (module, f"{node.name}.{each.name}")
                    self.definitions[method] = each
                    self._bodies[method] = [each]
                else:
                    rest.append(each)
            self._bodies[key] = rest
        self._bodies[module, ""] = own

    def has_module(self, name: str) -> bool:
        return name in self._trees

    def resolve(self, module: str, name: str) -> Key | None:
        """Where a name of a module is defined; a module's key has no name."""
        seen = set[Key]()
        while (module, name) not in seen:
            seen.add((module, name))
            if (module, name) in self.definitions:
                return module, name
            if f"{module}.{name}" in self._trees:
                return f"{module}.{name}", ""
            found = self._aliases.get(module, {}).get(name)
            if found is None:
                return None
            module, name = found
            if not name:
                return (module, "") if module in self._trees else None
        return None

    def uses(self, key: Key) -> Uses:
        return uses_of(self._bodies.get(key, []))

    def handed(self, module: str) -> set[str]:
        """Definitions that a decorator hands on when the module is imported."""
        return self._handed.get(module, set())

    def methods(self, name: str) -> set[Key]:
        return self._methods.get(name, set())

    def own_methods(self, key: Key) -> Iterator[Key]:
        prefix = f"{key[1]}."
        return (k for k in self.definitions if k[0] == key[0] and k[1].startswith(prefix))

    def is_called_from_elsewhere(self, key: Key) -> bool:
        """Whether a class has a base that is not of the product and calls its methods."""
        node = self.definitions[key]
        assert isinstance(node, ast.ClassDef)
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            text = _dotted(base)
            if text is None:
                return True
            found = self._of_dotted(key[0], text)
            if found is None and text.split(".")[-1] not in PASSIVE_BASES:
                return True
            if found in self.definitions and found != key and self.is_called_from_elsewhere(found):
                return True
        return False

    def _of_dotted(self, module: str, text: str) -> Key | None:
        first, *rest = text.split(".")
        found = self.resolve(module, first)
        for part in rest:
            if found is None or found[1]:
                return None
            found = self.resolve(found[0], part)
        return found


class _Walk:
    def __init__(self, product: Product, mentioned: set[str]) -> None:
        self.product = product
        self.reached: set[Key] = set()
        self.entries: set[Key] = set()
        self._attributes = mentioned
        self._todo: list[Key] = []
        self._by_name: set[str] = set()
        """Modules that a string names or that are handed on: their functions may be asked for by
        name."""
        self._prefixes: set[str] = set()
        """Of module names, as in f"planner.probe.{name}"."""

    def add(self, module: str, name: str) -> None:
        """Reach a name of a module, and the module's own statements."""
        found = self.product.resolve(module, name) if name else (module, "")
        for key in {(module, ""), found, (found[0], "") if found else None}:
            if key is not None and self.product.has_module(key[0]) and key not in self.reached:
                self.reached.add(key)
                self._todo.append(key)

    def run(self) -> None:
        """Until nothing more is reached."""
        while self._todo:
            while self._todo:
                self._follow(self._todo.pop())
            for name in set(self._attributes):
                for prefix in self._prefixes:
                    if self.product.has_module(prefix + name):
                        self.add(prefix + name, "")
                        self._by_name.add(prefix + name)
                for module, method in self.product.methods(name):
                    if (module, method.split(".")[0]) in self.reached:
                        self.add(module, method)
                for module in self._by_name:
                    if (module, name) in self.product.definitions:
                        self.add(module, name)

    def _follow(self, key: Key) -> None:
        module, name = key
        uses = self.product.uses(key)
        self._attributes |= uses.attributes
        for each in uses.names:
            if (found := self.product.resolve(module, each)) is not None:
                self.add(module, each)
                if not found[1] and each in uses.passed:
                    self._by_name.add(found[0])
        for root, attribute in uses.chains:
            self._chain(module, root, attribute)
        for imported, _ in uses.imports:
            self.add(imported, "")
        for imported, what in uses.imports:
            if self.product.has_module(f"{imported}.{what}"):
                self.add(f"{imported}.{what}", "")
            elif name and what:  # imported where it is used
                self.add(imported, what)
        for text in uses.texts:
            self._text(text)
        if not name:
            for each in self.product.handed(module):
                self.add(module, each)
        elif isinstance(self.product.definitions[key], ast.ClassDef):
            self._follow_class(key)

    def _chain(self, module: str, root: str, attribute: str) -> None:
        first, *rest = root.split(".")
        found = self.product.resolve(module, first)
        if found is None and self.product.has_module(root):
            found = (root, "")  # import planner.machine
            rest = []
        for part in [*rest, attribute]:
            if found is None or found[1]:
                return
            found = self.product.resolve(found[0], part)
            if found is not None:
                self.add(*found)

    def _text(self, text: str) -> None:
        if text.removeprefix(":").isidentifier():
            self._attributes.add(text.removeprefix(":"))
        elif MODULE_NAME.fullmatch(text.removesuffix(".")) and text.endswith("."):
            self._prefixes.add(text)
        elif MODULE_NAME.fullmatch(text):
            module, _, name = text.partition(":")
            self.add(module, name)
            self._by_name.add(module)
        for module, name in PROGRAM.findall(text):
            self.add(module, name)

    def _follow_class(self, key: Key) -> None:
        every = self.product.is_called_from_elsewhere(key)
        for module, name in list(self.product.own_methods(key)):
            method = name.split(".")[1]
            asked_for = key in self.entries and not method.startswith("_")
            if every or asked_for or (method.startswith("__") and method.endswith("__")):
                self.add(module, name)
            node = self.product.definitions[module, name]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _handed_on(node):
                self.add(module, name)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Of a module, those within `if` and `try` too."""
    todo: list[ast.stmt] = list(reversed(tree.body))
    while todo:
        node = todo.pop()
        parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        parts += [handler.body for handler in getattr(node, "handlers", [])]
        if isinstance(node, ast.If | ast.Try | ast.With):
            todo += [each for part in reversed(parts) for each in reversed(part)]
            if isinstance(node, ast.If):
                yield ast.Expr(value=node.test)
        else:
            yield node


def _aliases(tree: ast.Module) -> Iterator[tuple[str, Key]]:
    """Names that imports give to a module, wherever in it they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, (node.module or "", alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, (alias.name, "")


def _handed_on(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = (_dotted(call) or "?").split(".")[-1]
        if name not in PASSIVE_DECORATORS:
            return True
    return False


def _dotted(node: ast.AST) -> str | None:
    """The text of name.attribute.attribute; None of anything else."""
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
