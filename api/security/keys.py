"""API keys: 256 random bits, kept as SHA-256, with scopes.

A hash without salt or stretching is right here: nobody can search 2^256 keys, and the lookup by
hash is one read of an index.
"""

import hashlib
import hmac
import re
import secrets
import time
import uuid
from dataclasses import dataclass

from api.storage.access import Access
from api.storage.tables import KeyRow
from runtime.errors import InputError

PREFIX = "gnnplan_"
SCOPES = ("read", "plan", "run", "admin")
INCLUDED = {
    "read": {"read"},
    "plan": {"read", "plan"},
    "run": {"read", "run"},
    "admin": set(SCOPES),
}
"""What each scope allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """Who asks."""

    name: str
    """Id of a key, or `local` where none is needed."""
    scopes: frozenset[str]


LOCAL = Principal(name="local", scopes=frozenset(SCOPES))
"""Whoever can connect, on a loopback address without keys."""


def create_key(access: Access, name: str, scopes: list[str]) -> tuple[KeyRow, str]:
    """Make a key; the text is shown once and never stored.

    Raises:
        InputError: an unknown scope, or a name that is none.
    """
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
        sha256=hash_of(text),
        scopes=",".join(s for s in SCOPES if s in scopes),
        created_seconds=time.time(),
        revoked_seconds=None,
    )
    access.add_key(row)
    return row, text


def hash_of(text: str) -> str:
    """What is stored of a key."""
    return hashlib.sha256(text.encode()).hexdigest()


def principal_of(access: Access, text: str) -> Principal | None:
    """Whose key this is; None where it is wrong or revoked."""
    digest = hash_of(text)
    row = access.key_of_hash(digest)
    if row is None or not hmac.compare_digest(row.sha256, digest):
        return None
    if row.revoked_seconds is not None:
        return None
    allowed: set[str] = set()
    for scope in row.scopes.split(","):
        allowed |= INCLUDED.get(scope, set())
    return Principal(name=row.id, scopes=frozenset(allowed))
