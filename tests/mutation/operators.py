"""Small faults that can be planted in a source file, found on its syntax tree.

Each is one edit of one place. Left alone are annotations, decorators, docstrings, messages of
errors and logs, f-strings, assertions and `if TYPE_CHECKING`: a fault there changes no result.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], tuple[str, str, str | None]] = {
    ast.Eq: ("==", "!=", None),
    ast.NotEq: ("!=", "==", None),
    ast.Lt: ("<", ">=", "<="),
    ast.LtE: ("<=", ">", "<"),
    ast.Gt: (">", "<=", ">="),
    ast.GtE: (">=", "<", ">"),
    ast.Is: ("is", "is not", None),
    ast.IsNot: ("is not", "is", None),
    ast.In: ("in", "not in", None),
    ast.NotIn: ("not in", "in", None),
}
"""How a comparison is written, its opposite, and the same with the other boundary."""
COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
}
PAIRED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum",
    "maximum": "minimum", "argmin": "argmax", "argmax": "argmin", "floor": "ceil", "ceil": "floor",
    "amin": "amax", "amax": "amin", "append": "extend", "isfinite": "isnan",
}  # fmt: skip
SAID = re.compile(r"^(log\w*|warn\w*|print|echo|info|debug|Option|Argument|TypeVar|cast|Field)$")
"""Functions whose arguments are words for people or for the type checker."""
WORDS = (  # what people are shown, and how it looks
    "help",
    "description",
    "title",
    "summary",
    "metavar",
    "stacklevel",
    "doc",
    "media_type",
    "class_",
    "text_anchor",
    "role",
    "encoding",
)
NAMES_TRIED = 2


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A text in place of the bytes start..end of a file."""

    start: int
    end: int
    text: str
    operator: str


def find_edits(source: bytes, required: Mapping[str, frozenset[str]]) -> list[Edit]:
    """Every edit of a file, in order of place; a few of them do not compile (`compiles`).

    Args:
        source: the file, UTF-8.
        required: by name of a function or class, keywords that a call of it cannot leave out.
    """
    finder = _Finder(source, required)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found), key=lambda e: (e.start, e.end, e.operator, e.text))


def apply_edit(source: bytes, edit: Edit) -> bytes:
    """The file with the edit."""
    return source[: edit.start] + edit.text.encode() + source[edit.end :]


def required_keywords(trees: Iterator[ast.Module]) -> dict[str, frozenset[str]]:
    """By name of each function or class: parameters and fields without a default.

    Of several that share a name, what any of them requires.
    """
    found: dict[str, frozenset[str]] = {}

    def add(name: str, keywords: list[str]) -> None:
        found[name] = found.get(name, frozenset()) | frozenset(keywords)

    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args.posonlyargs + node.args.args
                missing = [a.arg for a in given[: len(given) - len(node.args.defaults)]]
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                add(node.name, missing + [a.arg for a, default in pairs if default is None])
            elif isinstance(node, ast.ClassDef):
                fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and f.value is None]
                add(node.name, [f.target.id for f in fields if isinstance(f.target, ast.Name)])
    return found


def compiles(source: bytes) -> bool:
    """Whether Python takes the text for a program."""
    try:
        compile(source, "planted", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _called(node: ast.Call) -> str:
    """Last name of what is called."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes, required: Mapping[str, frozenset[str]]) -> None:
        self.source, self.required = source, required
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Edit] = []
        self.parameters: dict[str, str] = {}
        self.assigned: dict[str, int] = {}

    # Places and texts.

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def put(self, node: ast.expr | ast.stmt, text: str, operator: str) -> None:
        start, end = self.span(node)
        self.found.append(Edit(start=start, end=end, text=text, operator=operator))

    def swap(self, left: ast.expr, right: ast.expr, old: str, new: str, operator: str) -> None:
        """Another operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = self.source[start:end].decode()
        pattern = r"\s+".join(map(re.escape, old.split()))
        text, count = re.subn(pattern, lambda _: new, gap, count=1)
        if count:
            self.found.append(Edit(start=start, end=end, text=text, operator=operator))

    def drop(self, node: ast.stmt) -> None:
        self.put(node, "pass", "statement dropped")

    # Statements.

    def visit_Module(self, node: ast.Module) -> None:
        self.body(node.body)

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.body(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside = self.parameters, self.assigned
        every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        self.parameters = {
            a.arg: ast.unparse(a.annotation) for a in every if a.annotation is not None
        }
        self.assigned = {}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                first = self.assigned.get(inner.id, inner.lineno)
                self.assigned[inner.id] = min(first, inner.lineno)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self.body(node.body)
        self.parameters, self.assigned = outside

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's name

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if any(name.startswith("__") for name in names):
            return
        unpacked = any(isinstance(target, ast.Tuple | ast.List) for target in node.targets)
        worded = isinstance(node.value, ast.JoinedStr)
        if not names and not unpacked and not worded:
            self.drop(node)
        for target in node.targets:
            self.visit(target)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.drop(node)
        if type(node.op) in COMPUTED:
            old, new = COMPUTED[type(node.op)]
            self.swap(node.target, node.value, f"{old}=", f"{new}=", "arithmetic")
        elif isinstance(node.op, ast.BitOr):
            self.swap(node.target, node.value, "|=", "&=", "arithmetic")
        self.visit(node.target)
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call) and not SAID.match(_called(value)):
            self.drop(node)
            self.visit(value)
        elif isinstance(value, ast.Yield):
            self.visit(value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.drop(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.drop(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.drop(node)
            return
        if isinstance(node.value, ast.Name):
            self.rename(node.value)
        self.visit(node.value)

    def rename(self, node: ast.Name) -> None:
        """Other names that hold something by then: of the same annotation, else assigned last."""
        annotation = self.parameters.get(node.id)
        if annotation is not None:
            others = [n for n, a in self.parameters.items() if a == annotation and n != node.id]
        else:
            earlier = [(line, n) for n, line in self.assigned.items() if line < node.lineno]
            others = [n for _, n in sorted(earlier, reverse=True) if n != node.id]
        for other in others[:NAMES_TRIED]:
            self.put(node, other, "other name")

    def visit_If(self, node: ast.If) -> None:
        condition = ast.unparse(node.test)
        if "TYPE_CHECKING" in condition or "__name__" in condition:
            return
        self.negate(node.test)
        if not node.orelse:
            self.put(node.test, "False", "guard removed")
        self.visit(node.test)
        self.body(node.body)
        self.body(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self.visit(node.test)
        self.body(node.body)
        self.body(node.orelse)

    # Expressions.

    def negate(self, test: ast.expr) -> None:
        twice = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if not twice and not isinstance(test, ast.Compare):  # whose opposites are found there
            self.put(test, f"(not ({self.text(test)}))", "negation")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        for test in node.ifs:
            self.put(test, "True", "guard removed")
            self.negate(test)
            self.visit(test)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            old, opposite, boundary = COMPARED[type(op)]
            self.swap(left, right, old, opposite, "comparison")
            if boundary is not None:
                self.swap(left, right, old, boundary, "boundary")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in COMPUTED and not isinstance(node.left, ast.JoinedStr | ast.List):
            old, new = COMPUTED[type(node.op)]
            self.swap(node.left, node.right, old, new, "arithmetic")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            self.swap(left, right, old, new, "logic")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.put(node, f"({self.text(node.operand)})", "negation")
        elif isinstance(node.op, ast.USub | ast.Invert):
            self.put(node, f"({self.text(node.operand)})", "sign")
        self.visit(node.operand)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.put(node, str(not value), "flag")
        elif isinstance(value, int):
            self.put(node, f"({value + 1})", "constant")
            self.put(node, f"({value - 1})", "constant")
        elif isinstance(value, float):
            self.put(node, "(1.0)" if value == 0 else f"({2 * value!r})", "constant")
            if value:
                self.put(node, f"({value / 2!r})", "constant")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice):
            for bound in (node.slice.lower, node.slice.upper):
                if bound is not None:
                    self.shift(bound)
        self.visit(node.value)
        if not isinstance(node.slice, ast.Name):
            self.visit(node.slice)

    def shift(self, bound: ast.expr) -> None:
        """Off by one; constants are found as such."""
        if isinstance(bound, ast.Name | ast.Attribute | ast.BinOp | ast.Call):
            self.put(bound, f"({self.text(bound)} + 1)", "off by one")
            self.put(bound, f"({self.text(bound)} - 1)", "off by one")

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node)
        if SAID.match(name):
            return
        if name in PAIRED:
            _, end = self.span(node.func)
            start = end - len(name.encode())
            text = PAIRED[name]
            self.found.append(Edit(start=start, end=end, text=text, operator="extreme"))
        if name == "range":
            self.shift(node.args[-1])
        for one, two in zip(node.args, node.args[1:], strict=False):
            kinds = type(one), type(two)
            if kinds[0] is kinds[1] and not isinstance(one, ast.Constant | ast.Starred):
                (start, _), (_, end) = self.span(one), self.span(two)
                gap = self.source[self.span(one)[1] : self.span(two)[0]].decode()
                text = self.text(two) + gap + self.text(one)
                swapped = Edit(start=start, end=end, text=text, operator="arguments swapped")
                self.found.append(swapped)
        for argument in node.args:
            if isinstance(argument, ast.Name) and argument.id in self.parameters:
                self.rename(argument)
        for keyword in node.keywords:
            self.drop_keyword(node, keyword, name)
        self.visit(node.func)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in WORDS:
                self.visit(keyword.value)

    def drop_keyword(self, node: ast.Call, keyword: ast.keyword, name: str) -> None:
        if keyword.arg is None or keyword.arg in (*WORDS, *self.required.get(name, ())):
            return
        start = self.starts[keyword.lineno - 1] + keyword.col_offset
        end = self.span(keyword.value)[1]
        after = re.match(rb"[\s)]*,\s*", self.source[end:])
        if after is not None and b")" not in after.group():
            end += after.end()
        self.found.append(Edit(start=start, end=end, text="", operator="argument dropped"))
