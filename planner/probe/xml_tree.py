"""A small XML tree without documents' own definitions: no DOCTYPE, no entities, bounded size.

The standard tree builders expand entities that a file defines, which lets a few bytes become
gigabytes; a topology needs none of that.
"""

from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from planner.errors import MachineError

MOST_BYTES = 16 << 20
MOST_DEPTH = 64


@dataclass(slots=True)
class Element:
    """A tag, its attributes and what is inside."""

    tag: str
    attributes: dict[str, str]
    children: list["Element"] = field(default_factory=list["Element"])

    def all(self, tag: str) -> list["Element"]:
        """Elements of that tag anywhere inside, in order."""
        found: list[Element] = []
        for child in self.children:
            found += [child] if child.tag == tag else []
            found += child.all(tag)
        return found


def read_xml(path: Path) -> Element:
    """The root element of a file.

    Raises:
        MachineError: not well-formed, with a DOCTYPE, too large or too deep.
    """
    data = path.read_bytes()
    if len(data) > MOST_BYTES:
        raise MachineError(f"{path}: expected at most {MOST_BYTES} bytes of XML, found {len(data)}")
    top = Element(tag="", attributes={})
    stack = [top]

    def start(tag: str, attributes: dict[str, str]) -> None:
        if len(stack) > MOST_DEPTH:
            raise MachineError(f"{path}: expected XML of at most {MOST_DEPTH} levels")
        element = Element(tag=tag, attributes=attributes)
        stack[-1].children.append(element)
        stack.append(element)

    def end(_: str) -> None:
        stack.pop()

    def refuse(*_: object) -> None:
        raise MachineError(f"{path}: expected XML without DOCTYPE and entities, found one")

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError) as error:
        raise MachineError(f"{path}: not XML ({error})") from None
    return top.children[0]
