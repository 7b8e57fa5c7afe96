"""Say who may do what, how often, and with which files: keys, scopes, owners, rates, paths.

An API key is 256 random bits, stored as its SHA-256 without salt or stretching: nobody can search
2^256 keys, and a key is found by one read of an index.

Jobs, runs and plans belong to the key that made them; it and admins may end or remove them. What
was made without a key, or before owners were stored, belongs to admins alone.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from gnnplan.api.errors import ForbiddenError, UnauthorizedError
from gnnplan.api.storage.storage import Access
from gnnplan.api.storage.tables import KeyRow
from gnnplan.planner.settings import MODELS
from gnnplan.runtime.errors import InputError

PREFIX = "gnnplan_"
SCOPES = ("read", "plan", "run", "admin")
INCLUDED = {
    "read": {"read"},
    "plan": {"read", "plan"},
    "run": {"read", "run"},
    "admin": set(SCOPES),
}
"""Scopes that each scope of a key includes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """Who sends a request."""

    name: str
    """Id of a key, or `local` where no key is needed."""
    scopes: frozenset[str]


LOCAL = Principal(name="local", scopes=frozenset(SCOPES))
"""Principal of every request where the service needs no keys."""


def create_key(access: Access, name: str, scopes: list[str]) -> tuple[KeyRow, str]:
    """Make a key and return its row and its text, which is never stored."""
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise InputError(
            f"expected scopes among {', '.join(SCOPES)}, found {', '.join(unknown) or 'none'}"
        )
    if not re.fullmatch(r"[\w .@-]{1,64}", name):
        raise InputError(
            f"expected a name of 1 to 64 letters, digits, spaces and .@-_, found {name!r}"
        )
    text = PREFIX + secrets.token_urlsafe(32)
    row = KeyRow(
        id=uuid.uuid4().hex[:12],
        name=name,
        sha256=hash_key(text),
        scopes=",".join(s for s in SCOPES if s in scopes),
        created_seconds=time.time(),
        revoked_seconds=None,
    )
    access.add_key(row)
    return row, text


def hash_key(text: str) -> str:
    """Return the stored form of a key."""
    return hashlib.sha256(text.encode()).hexdigest()


def principal_of(access: Access, text: str) -> Principal | None:
    """Return the principal of a key's text; None for an unknown or revoked key."""
    digest = hash_key(text)
    row = access.key_of_hash(digest)
    if row is None or not hmac.compare_digest(row.sha256, digest):
        return None
    if row.revoked_seconds is not None:
        return None
    allowed: set[str] = set()
    for scope in row.scopes.split(","):
        allowed |= INCLUDED.get(scope, set())
    return Principal(name=row.id, scopes=frozenset(allowed))


def owns(who: Principal, scope: str, owner: str) -> bool:
    """Return whether a principal may end or remove what `owner`'s key made with a scope."""
    return scope in who.scopes and ("admin" in who.scopes or owner == who.name)


def check_owner(who: Principal, scope: str, owner: str, what: str) -> None:
    """Refuse a principal that may not end or remove a thing, which `what` names."""
    if owns(who, scope, owner):
        return
    if scope not in who.scopes:
        raise wrong_scope(who, scope)
    raise ForbiddenError(
        f"{what}: expected the key that made it, or one with scope admin, found another",
        kind="not-owner",
    )


def wrong_scope(who: Principal, *scopes: str) -> ForbiddenError:
    """Make the refusal of a principal that has none of the needed scopes."""
    wanted = " or ".join(scopes)
    return ForbiddenError(
        f"expected a key with scope {wanted}, found {', '.join(sorted(who.scopes))}",
        kind="wrong-scope",
        scope=wanted,
    )


COOKIE = "gnnplan_key"
"""Name of the cookie with a browser's key; it must be HttpOnly and SameSite=Strict."""
REMEMBERED_SECONDS = 1.0
"""Seconds for which the answer to a key is used again, even if the key is revoked meanwhile."""
MOST_REMEMBERED = 10_000

bearer = HTTPBearer(auto_error=False, description="Key made by `gnnplan-serve keys create`.")


class Authenticator:
    """Finds the principal of requests, and remembers each key for a second."""

    def __init__(self, access: Access, *, require_key: bool) -> None:
        self._access = access
        self._require_key = require_key
        self._known: dict[str, tuple[float, Principal | None]] = {}

    async def principal(self, headers: Headers) -> Principal | None:
        """Return the principal of a request; None where a key is needed and missing."""
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

    async def still_knows(self, headers: Headers) -> bool:
        """Return whether a request that was let in would be let in now, too."""
        try:
            return await self.principal(headers) is not None
        except UnauthorizedError:
            return False

    async def _look_up(self, text: str) -> Principal | None:
        now, name = monotonic(), hash_key(text)
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
    """Return the key in a request's Authorization header or cookie, if any."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return text.strip()
    if scheme:
        return "an authorization that is no bearer key"
    return cookie_parser(headers.get("cookie", "")).get(COOKIE)


def principal_in(request: Request) -> Principal:
    """Return the principal of a request that passed the gate."""
    found: Principal | None = request.scope.get("principal")
    if found is None:
        raise UnauthorizedError(
            "expected a key: Authorization: Bearer gnnplan_..., found none",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return found


def require(*scopes: str) -> Callable[..., Any]:
    """Make a dependency that refuses principals without any of the scopes."""

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
"""Who may make something; each thing then asks for its own scope."""
Admin = Annotated[Principal, Depends(require("admin"))]


MOST_CLIENTS = 10_000


@dataclass(slots=True)
class _Bucket:
    tokens: float
    seen: float


class RateLimit:
    """A token bucket for each of many names, which holds tokens for two seconds."""

    def __init__(self, per_second: float) -> None:
        self._rate = per_second
        self._most = max(1.0, 2 * per_second)
        self._buckets: dict[str, _Bucket] = {}

    def wait_seconds(self, name: str) -> float:
        """Take a token; return 0, or the seconds until there is one."""
        now = time.monotonic()
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= MOST_CLIENTS:
                self._forget(now)
            bucket = self._buckets[name] = _Bucket(self._most, now)
        bucket.tokens = min(self._most, bucket.tokens + (now - bucket.seen) * self._rate)
        bucket.seen = now
        if bucket.tokens >= 1.0:
            bucket.tokens -= 1.0
            return 0.0
        return (1.0 - bucket.tokens) / self._rate

    def _forget(self, now: float) -> None:
        """Drop full buckets; drop all of them where too many remain."""
        full = self._most / self._rate
        self._buckets = {n: b for n, b in self._buckets.items() if now - b.seen < full}
        if len(self._buckets) >= MOST_CLIENTS:
            self._buckets.clear()


def check_model(name: str, allowed: Sequence[str]) -> None:
    """Refuse models that are neither built in nor allowed, as module or module:factory."""
    module = name.partition(":")[0]
    if name in MODELS or (":" in name and (name in allowed or module in allowed)):
        return
    known = ", ".join([*MODELS, *allowed])
    raise ForbiddenError(
        f"expected a model among {known}, found {name!r}; who runs the service can allow it with "
        "--allow-model",
        kind="model-not-allowed",
    )


class OutsideRootsError(PermissionError, InputError):
    """A path leads out of the graph roots; the text does not say what is there."""


def dataset_folder(roots: Sequence[Path], name: str) -> Path:
    """Return the folder of a dataset, of which every file is inside the roots.

    Raises:
        OutsideRootsError: the path, or a file in the folder, leads out of the roots.
        InputError: there is no such folder.
    """
    folder = confine_path(roots, name)
    try:
        files = list(folder.iterdir())
    except OSError as error:
        # A folder that is not there, is a file, has too long a name, or may not be read.
        found = "none" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError(f"{name}: expected a dataset folder, found {found}") from None
    real = [root.resolve() for root in roots]
    for path in files:
        if not _inside(path.resolve(), real):
            raise OutsideRootsError(f"{name}/{path.name}: expected a file inside the graph roots")
    return folder


def confine_path(roots: Sequence[Path], name: str) -> Path:
    """Return a path inside one of the roots, after following every link; refuse any other."""
    if "\0" in name or len(name) > 4096:
        raise OutsideRootsError(
            "expected a path, found one with a zero byte or over 4096 characters"
        )
    real = [root.resolve() for root in roots]
    found: Path | None = None
    for root in real:
        try:
            path = (root / name).resolve()
        except (OSError, RuntimeError, ValueError):
            continue  # a loop of links, or a name that no file can have
        if _inside(path, real):
            found = path if found is None or (_exists(path) and not _exists(found)) else found
    if found is None:
        raise OutsideRootsError(f"{name}: expected a path inside the graph roots of the service")
    return found


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)
