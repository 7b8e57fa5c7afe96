"""A class name stands for one thing in the whole product.

`tests/class_names.txt` lists the names that do not yet, with how many classes have each: a line
goes, or its number falls, and never the other way.
"""

import ast
from collections import Counter
from pathlib import Path

from tests.support.product import product_sources

LISTED = Path(__file__).with_name("class_names.txt")


def repeated(sources: dict[str, str]) -> dict[str, int]:
    """Class names of more than one module, and in how many they stand."""
    names = Counter(
        node.name
        for text in sources.values()
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    )
    return {name: count for name, count in sorted(names.items()) if count > 1}


def test_class_names_are_unique_but_for_the_list():
    lines = [line.split() for line in LISTED.read_text().splitlines()]
    allowed = {name: int(count) for name, count in lines}
    found = repeated(product_sources())
    assert found == allowed, "give a class its own name; the list only shrinks"


def test_a_repeated_name_is_found():
    assert repeated({"a": "class A: pass\nclass B: pass", "b": "class A: pass"}) == {"A": 2}
