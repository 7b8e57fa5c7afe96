"""What the names of columns and fields say of what they hold, in any of their usual spellings.

Names are compared without case and without anything but letters and digits, so `Node ID`,
`node_id` and `nodeId` are one.
"""

import re
from collections.abc import Iterable, Sequence

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
