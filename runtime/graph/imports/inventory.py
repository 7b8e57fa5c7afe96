"""Inventory of a source: its columns, fields, members and files, and what becomes of each.

A reader calls `meet` for every part that it finds, then `use` or `leave`. Parts with neither are
reported by `lines` as unknown to the format, so that nothing is lost without a word.

What a part holds is told by its name, in any usual spelling: names are compared in lower case, by
letters and digits alone, so `Node ID`, `node_id` and `nodeId` are one.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum

SHOWN_NAMES = 8
"""Most names of used columns that a line lists of those that differ in a number at their end."""


class Role(StrEnum):
    """Parts of a dataset that a part of a source can become."""

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
    "a dataset keeps one weight and one type per edge; where edges are stored in another order, "
    "edge_id.npy says which row of it belongs to which stored edge"
)


class Inventory:
    """The parts of one source, each with its role or the reason why it is not used.

    A part is known by its name and its place: its table, where a source has several, else "".
    """

    def __init__(self) -> None:
        self._roles: dict[tuple[str, str], Role | None] = {}
        self._reasons: dict[tuple[str, str], str] = {}

    def meet(self, names: Iterable[str], place: str = "") -> None:
        """Note that the source has these parts."""
        for name in names:
            self._roles.setdefault((name, place), None)

    def use(self, role: Role, *names: str, place: str = "") -> None:
        """Note the role of parts."""
        for name in names:
            self._roles[name, place] = role
            self._reasons.pop((name, place), None)

    def leave(self, reason: str, *names: str, place: str = "") -> None:
        """Note why parts are not used."""
        for name in names:
            self._roles[name, place] = None
            self._reasons[name, place] = reason

    def leave_unused(self, reason: str, *names: str, place: str = "") -> None:
        """Note a reason for those parts that have neither a role nor a reason yet."""
        for name in names:
            if self._roles.get((name, place)) is None and (name, place) not in self._reasons:
                self.leave(reason, name, place=place)

    def leave_role(self, role: Role, reason: str, place: str | None = None) -> None:
        """Note why parts with a role, of one table or of all, are not used after all."""
        for (name, at), have in list(self._roles.items()):
            if have is role and place in (None, at):
                self.leave(reason, name, place=at)

    def left_at(self, place: str) -> list[str]:
        """List the names of a table's parts that are left for a reason."""
        return [name for name, at in self._reasons if at == place]

    def origin(self, role: Role) -> str:
        """Name the parts with a role and their tables; of many that are numbered, some.

        No other name is left out: it may say that the part was meant to be something else.
        """
        places: dict[str, list[str]] = {}
        for (name, place), have in self._roles.items():
            if have is role:
                places.setdefault(place, []).append(name)
        return "; ".join(_join_names(names, place, SHOWN_NAMES) for place, names in places.items())

    def lines(self) -> list[str]:
        """Write one line for each reason why parts are not used, naming all of them."""
        groups: dict[tuple[str, str], list[str]] = {}
        for (name, place), role in self._roles.items():
            if role is None:
                key = (place, self._reasons.get((name, place), UNKNOWN))
                groups.setdefault(key, []).append(name)
        return [
            f"not used: {_join_names(names, place, len(names))} ({reason})"
            for (place, reason), names in groups.items()
        ]


def _join_names(names: list[str], place: str, most: int) -> str:
    shown: list[str] = []
    for stem, group in itertools.groupby(names, _stem):
        run = [_shorten(name) for name in group]
        if stem is not None and len(run) > most:
            run = [*run[: most - 2], "...", run[-1]]
        shown += run
    return ", ".join(shown) + (f" of {place}" if place else "")


def _stem(name: str) -> str | None:
    """Return a name without the number at its end; None where it has none."""
    found = re.fullmatch(r"(.*?)\d+", name, re.DOTALL)
    return None if found is None else found[1]


def _shorten(name: str) -> str:
    """Make a name one word of a line, for sources may hold line breaks and endless names."""
    text = name if name.isprintable() and name.strip() else repr(name)
    return text if len(text) <= 80 else text[:77] + "..."


NODE_ID = (
    "newid", "id", "nodeid", "node", "ids", "nodeids", "nodes", "vertex", "vertexid", "numericid",
    "nid",
)  # fmt: skip
ROW_NAMES = ("", "index", "unnamed0", "indexlevel0")
"""Names that saved data frames give to the column of their rows' names."""
LABEL = (
    "label", "y", "class", "labels", "target", "targets", "classes", "category", "categories",
    "nodelabel", "nodelabels", "groundtruth", "truelabel", "mltarget", "ytrue",
)  # fmt: skip
TARGET = ("pagetype", "mature")
"""Labels in published tables of labels, where no column has a usual name."""
LABEL_LIKE = ("response", "gt", "cls")
"""Names that alone look like labels; as parts of names they are of other things."""
SPLIT = ("split", "set", "subset", "partition", "fold")
MASKS = {
    "train": ("trainmask", "istrain", "train", "trainingmask"),
    "val": ("valmask", "validmask", "validationmask", "devmask", "isval", "isvalid",
            "isvalidation", "isdev", "val", "valid", "validation", "dev"),
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
TIME = ("time", "timestamp", "date", "datetime", "year")
EDGE_ROW = ("id", "edgeid", "eid", *ROW_NAMES)
"""Names of a first column that numbers the edges."""
FEATURE_ID = ("featureid", "feature", "featid", "featureindex", "col", "column")
FEATURE_VALUE = ("value", "val", "featurevalue")

MISSING = ("", "none", "nan", "null", "n/a", "na", "#n/a", "<na>", "?")
"""Words in lower case that tables have where a value is missing."""

HEADER_WORDS = (
    "src", "dst", "source", "target", "from", "to", "u", "v", "srcid", "dstid", "sourceid",
    "targetid", "destination", "weight", "edgeweight", "type", "edgetype", "id", "node", "nodeid",
    "label", "labels", "y", "class", "classes", "targets", "split", "trainmask", "valmask",
    "testmask", "featureid", "name",
)  # fmt: skip
"""Names that make a first line of text a header even over rows of text."""
HEADER_PAIRS = (
    ("user", "item"), ("user", "product"), ("customer", "product"), ("buyer", "seller"),
    ("citing", "cited"), ("follower", "followee"), ("follower", "following"), ("parent", "child"),
    ("subject", "object"), ("start", "end"), ("origin", "dest"), ("origin", "destination"),
    ("caller", "callee"), ("author", "paper"),
)  # fmt: skip
"""Pairs of names, in any order, that make a first line a header though each may be an id."""

TWO_KINDS = (
    ("user", "item"), ("user", "product"), ("user", "movie"), ("customer", "product"),
    ("author", "paper"),
)  # fmt: skip
"""Pairs of names, with or without id behind them, of which each counts nodes of its own."""

_LOOKS = {
    "a mask": ("mask", "masks"),
    "a split": (
        "split", "splits", "fold", "folds", "kfold", "train", "training", "val", "valid",
        "validation", "eval", "evaluation", "test", "testing", "holdout",
    ),
    "labels": (
        "label", "labels", "class", "classes", "target", "targets", "category", "categories",
        "truth", "outcome", "outcomes", "lbl",
    ),
    "ids": ("id", "ids", "uid", "uuid", "guid", "idx", "index"),
}  # fmt: skip
_JOINED = {
    "a mask": re.compile("mask$"),
    "a split": re.compile("^(train|val|valid|eval|test)(set|data|flag)$|^in(train|val|test)$"),
    "labels": re.compile(
        r"^(label|target)|(label|target|class|category)s?$|^class(id|idx|no|name)$|^y\d+$"
    ),
    "ids": re.compile(
        "^(node|user|item|row|paper|author|entity|person|member|customer|account|product|movie|"
        "page|post|doc|document|article|protein|gene|company|object|record|feature)"
        "(id|ids|idx|index)$"
    ),
}
"""Names of two words written as one."""


def plain_name(name: str) -> str:
    """Return a name in lower case, of letters and digits alone."""
    return "".join(c for c in name.lower() if c.isalnum())


def column_named(names: Iterable[str], known: Sequence[str]) -> str | None:
    """Return the name whose plain form stands first among the known ones; None without any."""
    plain = {}
    for name in names:
        plain.setdefault(plain_name(name), name)
    return next((plain[word] for word in known if word in plain), None)


def names_column(cell: str) -> bool:
    """Return whether a cell of a first line is a usual name of a column.

    >>> names_column("label"), names_column("user_id"), names_column("user_7"), names_column("ann")
    (True, True, False, False)
    """
    plain = plain_name(cell)
    if not plain or any(c.isdigit() for c in plain):
        return False
    return plain in HEADER_WORDS or looks_like(cell) == "ids"


def looks_like(name: str) -> str | None:
    """Say what a column looks like that must not become a feature: a mask, labels, a split, ids.

    >>> looks_like("TrainMask2"), looks_like("user_id"), looks_like("age")
    ('a mask', 'ids', None)
    """
    plain = plain_name(name)
    exact = {
        "a mask": [word for words in MASKS.values() for word in words],
        "labels": (*LABEL, *LABEL_LIKE),
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
