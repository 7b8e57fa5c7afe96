"""Operands of atomics have the pointer's type: a bare number does nothing in the interpreter."""

import ast
from pathlib import Path

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
NOT_OPERANDS = ("mask", "sem", "scope")


def bare_numbers(source: str) -> list[str]:
    """Atomic calls of a module that take a literal number for a value."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not node.func.attr.startswith("atomic_"):
            continue
        operands = [*node.args[1:], *(k.value for k in node.keywords if k.arg not in NOT_OPERANDS)]
        for each in operands:
            inner = each.operand if isinstance(each, ast.UnaryOp) else each
            if isinstance(inner, ast.Constant):
                found.append(ast.unparse(node))
    return found


def test_no_kernel_gives_an_atomic_a_bare_number() -> None:
    modules = [p for p in sorted(RUNTIME.rglob("*.py")) if "import triton" in p.read_text()]
    assert len(modules) >= 6
    calls = 0
    for path in modules:
        source = path.read_text()
        calls += source.count("tl.atomic_")
        assert bare_numbers(source) == [], path
    assert calls >= 6


def test_a_bare_number_would_be_noticed() -> None:
    assert bare_numbers("tl.atomic_cas(keys + slot, -1, value, sem='relaxed')")
    assert bare_numbers("tl.atomic_add(counts, val=1)")
    assert not bare_numbers("tl.atomic_add(counts, seen, mask=1)")
