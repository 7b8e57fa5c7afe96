"""Who may end or remove what somebody made: the key that made it, and admins.

Jobs, runs and plans belong to the key that asked for them. What was made while no key was asked
for, or before owners were kept, belongs to none, and is left to admins.
"""

from api.errors import ForbiddenError
from api.security.keys import Principal


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
