"""What an importer met in a source and what became of it, so that nothing is lost without a word.

A reader says `meet` of every column, field, member or file it finds, then `use` or `leave`. What it
says neither of is left all the same, by `lines`, as unknown to the format.

What the names of columns and fields say of what they hold, in any of their usual spellings.

Names are compared without case and without anything but letters and digits, so `Node ID`,
`node_id` and `nodeId` are one.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

SHOWN_NAMES = 8
"""Names of used columns that a line lists before it shortens them."""


class Role(StrEnum):
    """What a part of a source becomes in a dataset."""

    EDGES = "edges"
    WEIGHTS = "edge weights"
    EDGE_TYPES = "edge types"
    IDS = "node ids"
    FEATURES = "features"
    LABELS = "labels"
    SPLIT = "split"
    NODE_TYPES = "node types"
    DESCRIPTION = "description"


UNKNOWN = "not known to this format"
LOOKS = "looks like {}: rename it to have it as a feature"
EDGE_DATA = (
    "a dataset keeps one weight and one type per edge; edge_id.npy says which row of it belongs to "
    "which stored edge"
)


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    place: str
    """The table it is a column of, where a source has several."""


class Inventory:
    """The parts of one source, each with its role or the reason why it is not used."""

    def __init__(self) -> None:
        self._roles: dict[_Part, Role | None] = {}
        self._reasons: dict[_Part, str] = {}

    def meet(self, names: Iterable[str], place: str = "") -> None:
        """Note that the source has these parts."""
        for name in names:
            self._roles.setdefault(_Part(name, place), None)

    def use(self, role: Role, *names: str, place: str = "") -> None:
        """Note what parts become."""
        for name in names:
            part = _Part(name, place)
            self._roles[part] = role
            self._reasons.pop(part, None)

    def leave(self, reason: str, *names: str, place: str = "") -> None:
        """Note why parts are not used."""
        for name in names:
            part = _Part(name, place)
            self._roles[part] = None
            self._reasons[part] = reason

    def leave_unused(self, reason: str, *names: str) -> None:
        """Note why those of the parts that have no role and no reason yet are not used."""
        for name in names:
            part = _Part(name, "")
            if self._roles.get(part) is None and part not in self._reasons:
                self.leave(reason, name)

    def leave_role(self, role: Role, reason: str, place: str) -> None:
        """Note why a table's parts with a role are not used after all."""
        names = [p.name for p, have in self._roles.items() if have is role and p.place == place]
        self.leave(reason, *names, place=place)

    def used(self, role: Role) -> list[str]:
        """Names of the parts with a role, in the order they were met."""
        return [part.name for part, have in self._roles.items() if have is role]

    def left_at(self, place: str) -> list[str]:
        """Names of the parts of a table that were left for a reason."""
        return [part.name for part in self._reasons if part.place == place]

    def origin(self, role: Role) -> str:
        """The parts with a role in words: their names, shortened where many, and their table."""
        places: dict[str, list[str]] = {}
        for part, have in self._roles.items():
            if have is role:
                places.setdefault(part.place, []).append(part.name)
        return "; ".join(_named(names, place, SHOWN_NAMES) for place, names in places.items())

    def lines(self) -> list[str]:
        """One line for each reason why parts are not used, naming all of them."""
        groups: dict[tuple[str, str], list[str]] = {}
        for part, role in self._roles.items():
            if role is None:
                key = (part.place, self._reasons.get(part, UNKNOWN))
                groups.setdefault(key, []).append(part.name)
        return [
            f"not used: {_named(names, place, len(names))} ({reason})"
            for (place, reason), names in groups.items()
        ]


def _named(names: list[str], place: str, most: int) -> str:
    shown = [_plain(name) for name in names]
    if len(shown) > most:
        shown = [*shown[: most - 2], "...", shown[-1]]
    return ", ".join(shown) + (f" of {place}" if place else "")


def _plain(name: str) -> str:
    """A name as one word of a line: others' files may hold line breaks and endless names."""
    text = name if name.isprintable() and name.strip() else repr(name)
    return text if len(text) <= 80 else text[:77] + "..."


NODE_ID = ("id", "nodeid", "node", "ids", "nodeids", "nodes", "vertex", "vertexid")
ROW_NAMES = ("", "index", "unnamed0", "indexlevel0")
"""What a saved data frame calls the names of its rows."""
LABEL = (
    "label", "y", "class", "labels", "target", "targets", "classes", "category", "categories",
    "nodelabel", "nodelabels", "groundtruth", "truelabel", "mltarget", "ytrue",
)  # fmt: skip
SPLIT = ("split", "set", "subset", "partition", "fold")
MASKS = {
    "train": ("trainmask", "istrain", "train", "trainingmask"),
    "val": ("valmask", "validmask", "validationmask", "isval", "isvalid", "isvalidation", "val",
            "valid", "validation"),
    "test": ("testmask", "istest", "test", "testingmask"),
}  # fmt: skip
SRC = (
    "src", "source", "from", "u", "srcid", "sourceid", "fromnodeid", "fromnode", "fromid", "id1",
    "node1", "nodeid1", "sourcenode", "srcnode", "head", "sender", "row",
)  # fmt: skip
DST = (
    "dst", "target", "destination", "to", "v", "dstid", "targetid", "tonodeid", "tonode", "toid",
    "id2", "node2", "nodeid2", "targetnode", "dstnode", "tail", "receiver", "destinationid", "col",
)  # fmt: skip
WEIGHT = ("weight", "edgeweight", "weights", "edgeweights")
EDGE_TYPE = ("type", "edgetype")
EDGE_ROW = ("id", "edgeid", "eid", *ROW_NAMES)
"""Names of a first column that numbers the edges themselves."""
FEATURE_ID = ("featureid", "feature", "featid", "featureindex", "col", "column")
FEATURE_VALUE = ("value", "val", "featurevalue")

HEADER_WORDS = (
    "src", "dst", "source", "target", "from", "to", "u", "v", "srcid", "dstid", "sourceid",
    "targetid", "destination", "weight", "edgeweight", "type", "edgetype", "id", "node", "nodeid",
    "label", "labels", "y", "class", "classes", "targets", "split", "trainmask", "valmask",
    "testmask", "featureid",
)  # fmt: skip
"""Names that make a first line of text a header even over rows of text."""

_LOOKS = {
    "a mask": ("mask", "masks"),
    "a split": (
        "split", "splits", "fold", "folds", "train", "training", "val", "valid", "validation",
        "test", "testing",
    ),
    "labels": (
        "label", "labels", "class", "classes", "target", "targets", "category", "categories",
        "truth",
    ),
    "ids": ("id", "ids", "uid", "uuid", "guid", "idx", "index"),
}  # fmt: skip
_JOINED = {
    "a mask": re.compile("mask$"),
    "a split": re.compile("^(train|val|valid|test)(set|data|flag)$"),
    "labels": re.compile(
        "^(label|target)|(label|target|class|category)s?$|^class(id|idx|no|name)$"
    ),
    "ids": re.compile("^(node|user|item|row)(id|idx|index)$"),
}
"""Names of two words written as one."""


def plain_name(name: str) -> str:
    """A name in lower case, of letters and digits alone."""
    return "".join(c for c in name.lower() if c.isalnum())


def column_named(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The first name that is known; what is known first comes first."""
    plain = {}
    for name in names:
        plain.setdefault(plain_name(name), name)
    return next((plain[word] for word in known if word in plain), None)


def looks_like(name: str) -> str | None:
    """What a column that must not be a feature unasked looks like: a mask, labels, a split, ids.

    >>> looks_like("TrainMask2"), looks_like("user_id"), looks_like("age")
    ('a mask', 'ids', None)
    """
    plain = plain_name(name)
    exact = {
        "a mask": [word for words in MASKS.values() for word in words],
        "labels": LABEL,
        "a split": SPLIT,
        "ids": (*NODE_ID, *ROW_NAMES),
    }
    for kind, words in exact.items():
        if plain in words:
            return kind
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    tokens = set(re.findall(r"[^\W\d_]+", spaced))
    for kind, words in _LOOKS.items():
        if tokens & set(words):
            return kind
    return next((kind for kind, joined in _JOINED.items() if joined.search(plain)), None)
