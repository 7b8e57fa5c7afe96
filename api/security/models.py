"""Which models a request may name: importing one runs its code."""

from collections.abc import Sequence

from api.errors import ForbiddenError
from planner.settings import MODELS


def check_model(name: str, allowed: Sequence[str]) -> None:
    """Let through the runtime's own models and those on the list.

    Args:
        name: sage, gcn ... or module:factory.
        allowed: modules, or module:factory, each by its whole name.

    Raises:
        ForbiddenError: it is neither.
    """
    module = name.partition(":")[0]
    if name in MODELS or (":" in name and (name in allowed or module in allowed)):
        return
    known = ", ".join([*MODELS, *allowed])
    raise ForbiddenError(
        f"expected a model among {known}, found {name!r}; who runs the service can allow it with "
        "--allow-model",
        kind="model-not-allowed",
    )
