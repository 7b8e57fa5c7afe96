"""The gradient's all-reduce in parts, under way while the backward pass still runs.

The last layer's gradients are ready first. Two thirds of forward_backward are the backward pass (of
a layer's three products, two are its gradients'), and the parts are taken to be ready evenly over
it; the runtime makes parts of at least 1 MiB (runtime.train.parts).
"""

from collections.abc import Callable

from planner.cost.all_reduce import exposed_bucket_seconds
from runtime.train.parts import most_parts

BACKWARD = 2 / 3
"""Share of forward_backward in which gradients come."""
LOSS_BYTES = 4.0
"""The loss is sent last, by itself."""


def exposed_in_parts(
    all_reduce: Callable[[float], float],
    message_bytes: float,
    forward_backward: float,
    eta: float,
) -> float:
    """Seconds of the all-reduce that the training thread still waits for.

    sum_k T_k - eta (sum_k T_k - exposed) + T(loss), exposed as [A3]'s buckets leave it

    Args:
        all_reduce: seconds of one all-reduce of so many bytes.
        message_bytes: of the gradient.
        forward_backward: seconds.
        eta: share of what compute could hide that it does hide.

    Source: docs/formulas.md 8.3 [A3]; docs/modelling.md 5.

    >>> def ring(n):
    ...     return 1e-4 + n / 1e9
    >>> round(1e3 * exposed_in_parts(ring, 8 * 2**20, 0.1, 1.0), 2)  # the last part, and the loss
    1.25
    >>> exposed_in_parts(ring, 8 * 2**20, 0.1, 0.0) > ring(8 * 2**20)  # nothing hidden
    True
    """
    parts = most_parts(message_bytes)
    each = all_reduce(message_bytes / parts)
    ready = [forward_backward * (1 - BACKWARD * (1 - (k + 1) / parts)) for k in range(parts)]
    hidden = parts * each - exposed_bucket_seconds(ready, [each] * parts)
    return parts * each - eta * hidden + all_reduce(LOSS_BYTES)
