"""From a request's headers to who asks, and from a route's scope to yes or no.

Who may end or remove what somebody made: the key that made it, and admins.

Jobs, runs and plans belong to the key that asked for them. What was made while no key was asked
for, or before owners were kept, belongs to none, and is left to admins.
"""

import asyncio
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from time import monotonic
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers

from api.errors import ForbiddenError, UnauthorizedError
from api.security.keys import LOCAL, Principal, hash_of, principal_of
from api.storage.access import Access


def owns(who: Principal, scope: str, owner: str) -> bool:
    """Whether somebody may end or remove a thing.

    Args:
        who: who asks.
        scope: what it takes to make such things.
        owner: id of the key that made it.
    """
    return scope in who.scopes and ("admin" in who.scopes or owner == who.name)


def check_owner(who: Principal, scope: str, owner: str, what: str) -> None:
    """Let through who may end or remove a thing; `what` names it.

    Raises:
        ForbiddenError: the key has not the scope, or is not the one that made it.
    """
    if owns(who, scope, owner):
        return
    if scope not in who.scopes:
        raise wrong_scope(who, scope)
    raise ForbiddenError(
        f"{what}: expected the key that made it, or one with scope admin, found another",
        kind="not-owner",
    )


def wrong_scope(who: Principal, *scopes: str) -> ForbiddenError:
    """The refusal of a key that has none of the scopes that something takes."""
    wanted = " or ".join(scopes)
    return ForbiddenError(
        f"expected a key with scope {wanted}, found {', '.join(sorted(who.scopes))}",
        kind="wrong-scope",
        scope=wanted,
    )


COOKIE = "gnnplan_key"
"""Where a browser keeps its key; set by whoever shows a login, HttpOnly and SameSite=Strict."""
REMEMBERED_SECONDS = 1.0
"""A revoked key may be answered for so long after it was last looked up."""
MOST_REMEMBERED = 10_000

bearer = HTTPBearer(auto_error=False, description="Key made by `gnnplan-serve keys create`.")


class Authenticator:
    """Looks keys up, and remembers the answers for a second."""

    def __init__(self, access: Access, *, require_key: bool) -> None:
        self._access = access
        self._require_key = require_key
        self._known: dict[str, tuple[float, Principal | None]] = {}

    async def principal(self, headers: Headers) -> Principal | None:
        """Who asks; None where a key is needed and there is none.

        Raises:
            UnauthorizedError: the key is wrong or revoked.
        """
        text = key_of(headers)
        found = await self._look_up(text or "")
        if found is None and text:
            raise UnauthorizedError(
                "expected a valid key, found one that is unknown or revoked",
                headers={
                    "WWW-Authenticate": 'Bearer error="invalid_token"',
                    # A browser forgets it, and is shown the login when it asks again.
                    "Set-Cookie": f"{COOKIE}=; Max-Age=0; Path=/; HttpOnly; SameSite=Strict",
                },
            )
        return found

    async def _look_up(self, text: str) -> Principal | None:
        now, name = monotonic(), hash_of(text)
        known = self._known.get(name)
        if known is not None and now - known[0] < REMEMBERED_SECONDS:
            return known[1]
        found = await asyncio.to_thread(self._ask, text)
        if len(self._known) >= MOST_REMEMBERED:
            self._known.clear()
        self._known[name] = (now, found)
        return found

    def _ask(self, text: str) -> Principal | None:
        if text:
            return principal_of(self._access, text)
        # Revoking the last key must not let everybody in.
        needed = self._require_key or self._access.has_keys(revoked_too=True)
        return None if needed else LOCAL


def key_of(headers: Headers) -> str | None:
    """The key that a request carries, in its Authorization header or its cookie."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return text.strip()
    if scheme:
        return "an authorization that is no bearer key"
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if cookie is None else cookie.value


def principal_in(request: Request) -> Principal:
    """Who asks.

    Raises:
        UnauthorizedError: a key is needed and there is none.
    """
    found: Principal | None = request.scope.get("principal")
    if found is None:
        raise UnauthorizedError(
            "expected a key: Authorization: Bearer gnnplan_..., found none",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return found


def require(*scopes: str) -> Callable[..., Any]:
    """A dependency that lets through who holds one of the scopes."""

    async def check(request: Request, _shown: Annotated[Any, Security(bearer)]) -> Principal:
        principal = principal_in(request)
        if principal.scopes.isdisjoint(scopes):
            raise wrong_scope(principal, *scopes)
        return principal

    return check


Reader = Annotated[Principal, Depends(require("read"))]
Planner = Annotated[Principal, Depends(require("plan"))]
Runner = Annotated[Principal, Depends(require("run"))]
Maker = Annotated[Principal, Depends(require("plan", "run"))]
"""Who may make something; what was made says which scope ends it."""
Admin = Annotated[Principal, Depends(require("admin"))]
