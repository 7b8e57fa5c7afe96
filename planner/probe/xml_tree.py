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
    growing = _Growing(path)
    parser = expat.ParserCreate()
    parser.StartElementHandler = growing.start
    parser.EndElementHandler = growing.end
    parser.StartDoctypeDeclHandler = growing.refuse
    parser.EntityDeclHandler = growing.refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # LookupError: its encoding
        raise MachineError(f"{path}: not XML ({' '.join(str(error).split())[:120]})") from None
    return growing.top.children[0]


class _Growing:
    """The tree while it is read; its methods are the parser's handlers."""

    def __init__(self, path: Path) -> None:
        self.top = Element(tag="", attributes={})
        self._path = path
        self._stack = [self.top]

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """An element begins."""
        if len(self._stack) > MOST_DEPTH:
            raise MachineError(f"{self._path}: expected XML of at most {MOST_DEPTH} levels")
        element = Element(tag=tag, attributes=attributes)
        self._stack[-1].children.append(element)
        self._stack.append(element)

    def end(self, _tag: str) -> None:
        """The innermost element ends."""
        self._stack.pop()

    def refuse(self, *_: object) -> None:
        """The file defines something of its own."""
        raise MachineError(f"{self._path}: expected XML without DOCTYPE and entities, found one")
