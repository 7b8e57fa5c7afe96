"""Pages of rows, newest first: a cursor names the last row of the page before."""

import base64
import binascii
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, select, tuple_
from sqlalchemy.orm import Session

from runtime.errors import InputError

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page(Generic[Row]):
    """Some rows, and where the next page begins."""

    items: list[Row]
    next_cursor: str | None


def encode_cursor(position: Sequence[Any]) -> str:
    """A cursor for clients to hand back."""
    return base64.urlsafe_b64encode(json.dumps(list(position)).encode()).decode().rstrip("=")


def decode_cursor(text: str) -> tuple[float, str]:
    """Time and id of the last row of the page before.

    Raises:
        InputError: not a cursor of ours.
    """
    try:
        found: Any = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        time_seconds, row_id = found
        if not re.fullmatch(r"[0-9a-z]{1,64}", str(row_id)):
            raise ValueError(row_id)
        return float(time_seconds), str(row_id)
    except (ValueError, TypeError, OverflowError, binascii.Error, RecursionError):
        raise InputError(
            "cursor: expected the next_cursor of an earlier page, found something else"
        ) from None


def _number(row_id: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", row_id):
        raise InputError(f"cursor: expected that of the same list, found {row_id!r}")
    return int(row_id)


def page_of(
    session: Session,
    table: type[Row],
    *,
    order: tuple[Any, Any],
    where: Sequence[ColumnElement[bool]],
    cursor: str | None,
    limit: int,
) -> Page[Row]:
    """One page of a table.

    Args:
        session: an open transaction.
        table: mapped class.
        order: its columns of time and id; pages fall in both.
        where: filters.
        cursor: of the page before; None: the newest rows.
        limit: most rows.

    Raises:
        InputError: the cursor is none of ours.
    """
    query = select(table).where(*where).order_by(order[0].desc(), order[1].desc())
    if cursor is not None:
        time_seconds, row_id = decode_cursor(cursor)
        number = _number(row_id) if order[1].type.python_type is int else row_id
        query = query.where(tuple_(order[0], order[1]) < tuple_(time_seconds, number))
    found = list(session.scalars(query.limit(limit + 1)))
    more = len(found) > limit
    kept = found[:limit]
    last = kept[-1] if kept else None
    cursor_out = None
    if more and last is not None:
        cursor_out = encode_cursor([getattr(last, column.key) for column in order])
    return Page(items=kept, next_cursor=cursor_out)
