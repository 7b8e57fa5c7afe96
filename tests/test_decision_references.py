"""Every decision has a number of its own, and every number that is cited is a decision's."""

import re

import pytest

from tests.test_formula_references import ROOT, SOURCES

PAGE = (ROOT / "docs" / "decisions.md").read_text()
ENTRY = re.compile(
    r'^- <a id="dec-(\d+)"></a>\*\*DEC-(\d+)\*\* \(\d{4}-\d\d-\d\d\) \*\*.+', re.MULTILINE
)
NUMBERS = [int(number) for _, number in ENTRY.findall(PAGE)]
CITED = re.compile(r"\bDEC-?(\d+)\b")


def unresolved(text: str) -> list[int]:
    """Numbers that a text cites and no decision has."""
    return [number for number in map(int, CITED.findall(text)) if number not in NUMBERS]


def test_decisions_are_numbered_once_each_and_without_gaps():
    assert sorted(NUMBERS) == list(range(1, len(NUMBERS) + 1))
    assert all(anchor == number for anchor, number in ENTRY.findall(PAGE))
    assert len(NUMBERS) == len(re.findall("^- ", PAGE, re.MULTILINE))


def test_every_cited_decision_exists():
    assert {name: found for name, text in SOURCES.items() if (found := unresolved(text))} == {}


def test_citations_are_found_in_code():
    code = "".join(text for name, text in SOURCES.items() if name.endswith(".py"))
    assert len(set(CITED.findall(code))) >= 20


@pytest.mark.parametrize("number", [0, 9999])
@pytest.mark.parametrize("text", ["(DEC-{})", "see DEC-{}.", "as DEC-1 and DEC-{} say", "DEC{}"])
def test_a_citation_without_a_decision_is_found(text: str, number: int):
    assert unresolved(text.format(number)) == [number]
