"""Every reference to a formula or a modelling rule leads to its place in docs/."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("planner", "runtime", "api", "tests")
SUFFIXES = {".py", ".md", ".yaml"}

CODE = re.compile(r"\[([ABCLMRSU][1-9]\d?)\]")
"""An example or a rule, such as A7 in square brackets."""
ANCHOR = re.compile(r'<a id="([a-z]\d+)"></a>\*\*\[([A-Z]\d+)\]\*\*')
TARGET = re.compile(r"^\[([A-Z]\d+)\]: #(\S+)$", re.MULTILINE)
HEADING = re.compile(r"^#{2,3} (\d+(?:\.\d+)?)\.? ")
ITEM = re.compile(r"^(\d+)\. ")

CONTINUED = re.compile(r"\n[ \t]*(?:#[ \t]*)?")
"""Where a sentence goes on in the next line, of a comment too."""
FORMULAS = re.compile(
    r"\b[Ff]ormulas(?:\.md\)?)? (?:section )?"
    r"(\d+(?:\.\d+)*(?:(?:,|;| and| to) \d+(?:\.\d+)+)*)"
)
RULES = re.compile(r"\bmodelling\.md\)? (\d+(?:(?:,| and| to) \d+)*)")
WITHOUT_FOLDER = re.compile(r"(?<![\w/])(?:formulas|modelling)\.md")


def sections_of(page: str) -> set[str]:
    """Numbers of a page's headings, and of the numbered items below each, such as 6.6.7."""
    found: set[str] = set()
    heading = ""
    for line in page.splitlines():
        if match := HEADING.match(line):
            heading = match[1]
            found.add(heading)
        elif match := ITEM.match(line):
            found.add(f"{heading}.{match[1]}")
    return found


FORMULA_PAGE = (ROOT / "docs" / "formulas.md").read_text()
PLACES = {
    "code": {code for _, code in ANCHOR.findall(FORMULA_PAGE)},
    "formulas": sections_of(FORMULA_PAGE),
    "modelling": sections_of((ROOT / "docs" / "modelling.md").read_text()),
}


def references(text: str) -> Iterator[tuple[str, str]]:
    """Each reference of a text: what it refers to (a key of PLACES) and the code or number."""
    text = CONTINUED.sub(" ", text)
    for code in CODE.findall(text):
        yield "code", code
    for kind, pattern in (("formulas", FORMULAS), ("modelling", RULES)):
        for numbers in pattern.findall(text):
            for number in re.findall(r"[\d.]+", numbers):
                yield kind, number


def unresolved(text: str) -> list[tuple[str, str]]:
    return [(kind, name) for kind, name in references(text) if name not in PLACES[kind]]


def sources() -> Iterator[tuple[str, str]]:
    """Name and text of every file that may refer to the pages."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    for path in files:
        if path != Path(__file__).resolve():
            yield str(path.relative_to(ROOT)), path.read_text()


SOURCES = dict(sources())


def test_every_reference_leads_to_a_place_in_docs():
    wrong = {name: found for name, text in SOURCES.items() if (found := unresolved(text))}
    assert wrong == {}


def test_references_name_the_folder_of_the_page():
    named = {name: text for name, text in SOURCES.items() if name.endswith((".py", ".md"))}
    wrong = [name for name, text in named.items() if WITHOUT_FOLDER.search(text)]
    assert [name for name in wrong if not name.startswith("docs/")] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Source: docs/formulas.md 8.7 [A7]; 5.5.", [("code", "A7"), ("formulas", "8.7")]),
        ("(formulas 2.3, 2.4 and 6.2)", [("formulas", x) for x in ("2.3", "2.4", "6.2")]),
        ("Formulas 4.6 to\n    # 4.9; so", [("formulas", "4.6"), ("formulas", "4.9")]),
        ("formulas section 4; edges 01,02", [("formulas", "4")]),
        ("formulas 6.6.7: at alpha", [("formulas", "6.6.7")]),
        ("docs/modelling.md 1, 5 and 11.", [("modelling", x) for x in ("1", "5", "11")]),
        ("see [formulas](../docs/formulas.md) 3.6)", [("formulas", "3.6")]),
        ("as the formulas\nsay: 3.6", []),
    ],
)
def test_a_reference_is_read_in_each_of_its_forms(text: str, found: list[tuple[str, str]]):
    assert list(references(text)) == found
    assert unresolved(text) == []


@pytest.mark.parametrize(
    "text", ["[A11]", "[C27]", "formulas 1.9", "formulas.md 9", "formulas 6.6.8", "modelling.md 16"]
)
def test_a_reference_without_a_place_is_found(text: str):
    assert len(unresolved(text)) == 1


def test_every_code_has_one_anchor_and_its_link():
    anchors = ANCHOR.findall(FORMULA_PAGE)
    assert Counter(FORMULA_PAGE.count(f'id="{name}"') for name, _ in anchors) == {1: len(anchors)}
    assert all(name == code.lower() for name, code in anchors)
    assert sorted(TARGET.findall(FORMULA_PAGE)) == sorted((code, name) for name, code in anchors)


def test_descriptions_that_users_see_cite_no_formula():
    shown = {name: text for name, text in SOURCES.items() if name.endswith(".yaml")}
    assert len(shown) > 10
    assert {name: found for name, text in shown.items() if (found := [*references(text)])} == {}
