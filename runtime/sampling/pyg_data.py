"""PyG's Data and HeteroData, which say why a field is missing and how a script gets it.

PyG reads as None what a Data lacks of its own properties (edge_attr, pos, time, face): here that
comes with one warning where import met such a field and left it out. All other names stay an
AttributeError, as PyG's `hasattr` and `getattr` want it, with the reason in its text.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage, EdgeStorage, NodeStorage

from gnnplan.runtime.errors import warn_once
from gnnplan.runtime.graph.imports.inventory import EDGE_DATA

_FORMS = {
    "e_id": "padded batches have it with edge_data or edge weights alone",
    "edge_label": "links come so with neg_sampling='binary'",
    "edge_label_index": "links come so with neg_sampling='binary'",
    "src_index": "links come so with neg_sampling='triplet'",
    "dst_pos_index": "links come so with neg_sampling='triplet'",
    "dst_neg_index": "links come so with neg_sampling='triplet'",
}
"""What gives a batch the fields that depend on the loader's own keywords."""


def tell(data: Any, notes: Sequence[str]) -> None:
    """Give a batch the lines of the dataset's import, for who reads a field that is not there."""
    data.__dict__["_notes"] = notes


def _note_on(name: str, notes: Sequence[str]) -> str:
    """Return what import said of a field of the source; empty where it said nothing."""
    word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    for line in notes:
        if word.search(line) or (name == "edge_attr" and EDGE_DATA in line):
            return line
    return ""


def _explain(name: str, notes: Sequence[str], place: Any = None) -> str:
    """Say why a field is missing, and how to have it; `place` is its type of nodes or edges."""
    if name.startswith("_"):
        return ""
    if name in _FORMS:
        return f"; {_FORMS[name]}"
    said = _note_on(name, notes)
    of_edges = isinstance(place, tuple) if place is not None else name.startswith("edge")
    given = f"{{{name!r}: ...}}" if place is None else f"{{{place!r}: {{{name!r}: ...}}}}"
    keyword, ids = ("edge_data", "e_id") if of_edges else ("node_data", "n_id")
    why = f" (import: {said})" if said else ""
    return (
        f"; the dataset does not hand it out{why}: give PlannedLoader {keyword}={given}, or take "
        f"rows of your own by {ids}"
    )


def _notes_of(holder: Any) -> Sequence[str]:
    return () if holder is None else holder.__dict__.get("_notes", ())


class LoadedData(Data):
    """A batch as PyG's Data."""

    def __getattr__(self, key: str) -> Any:
        """Return a field of the batch; the error for a missing one says how to have it."""
        try:
            return super().__getattr__(key)
        except AttributeError as error:
            raise AttributeError(f"{error}{_explain(key, _notes_of(self))}") from None


def _read_or_warn(name: str) -> property:
    def read(self: LoadedData) -> Any:
        if name in self._store:
            return self._store[name]
        if _note_on(name, notes := _notes_of(self)):
            text = f"batch.{name} is None{_explain(name, notes)}"
            warn_once(f"batch.{name}", text, UserWarning)
        return None

    return property(read)


for _name in ("edge_attr", "pos", "time", "face"):
    setattr(LoadedData, _name, _read_or_warn(_name))


class _Explained(BaseStorage):
    """Fields of one type, of which missing ones are explained."""

    def __getattr__(self, key: str) -> Any:
        try:
            return super().__getattr__(key)
        except AttributeError as error:
            parent = self.__dict__.get("_parent")
            notes = _notes_of(parent and parent())
            place = self.__dict__.get("_key")
            raise AttributeError(f"{error}{_explain(key, notes, place)}") from None


class LoadedNodes(_Explained, NodeStorage):
    """Nodes of one type of a batch."""


class LoadedEdges(_Explained, EdgeStorage):
    """Edges of one type of a batch."""


class LoadedHeteroData(HeteroData):
    """A batch of a typed graph as PyG's HeteroData."""

    def get_node_store(self, key: str) -> NodeStorage:
        """Return the fields of a type of nodes, made where there are none."""
        if key not in self._node_store_dict:
            self._node_store_dict[key] = LoadedNodes(_parent=self, _key=key)
        return super().get_node_store(key)

    def get_edge_store(self, src: str, rel: str, dst: str) -> EdgeStorage:
        """Return the fields of a type of edges, made where there are none."""
        key = src, rel, dst
        if key not in self._edge_store_dict:
            self._edge_store_dict[key] = LoadedEdges(_parent=self, _key=key)
        return super().get_edge_store(src, rel, dst)

    def collect(self, key: str, *arguments: Any, **settings: Any) -> Any:
        """Return a field of all types that have it; the error for none says how to have it."""
        try:
            return super().collect(key, *arguments, **settings)
        except KeyError as error:
            raise KeyError(f"{error.args[0]}{_explain(key, _notes_of(self))}") from None
