"""What every resource shares."""

from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")

Document = dict[str, Any]
"""A document whose shape its own producer defines."""


class Strict(BaseModel):
    """Unknown fields are refused; values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Problem(BaseModel):
    """RFC 9457 problem details; a type may add members."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(default="about:blank", description="What kind of problem, as a short name.")
    title: str
    status: int
    detail: str = ""
    instance: str = ""
    constraint: str | None = Field(
        default=None, description="plan-does-not-fit: the memory whose sum fails."
    )
    needed_bytes: int | None = None
    available_bytes: int | None = None


class PageOf(Strict, Generic[Item]):
    """Some items, newest first."""

    items: list[Item]
    next_cursor: str | None = Field(
        default=None, description="Give as cursor for the next page; null: this was the last."
    )


class Health(Strict):
    """The service answers."""

    status: str = "ok"
    version: str
