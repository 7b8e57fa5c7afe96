"""Stage `all_reduce`: summing one flat gradient over ranks, elapsed seconds.

The probe's curve, measured while all ranks compute, is used where there is one; the ring formula
stands in for machines known from a preset only. The wait for the slowest rank is in straggler.py.
"""

from collections.abc import Sequence

from planner.machine import Table

GRADIENT_ITEM_BYTES = 4
"""Gradients are summed in float32."""


def gradient_bytes(num_parameters: int) -> int:
    """Bytes of the flat gradient.

    >>> gradient_bytes(1000)
    4000
    """
    return num_parameters * GRADIENT_ITEM_BYTES


def all_reduce_seconds(table: Table, message_bytes: float, ranks: int) -> float:
    """Measured seconds of one all-reduce of that size; nothing for one rank.

    Args:
        table: seconds over (bytes, ranks), measured with all ranks computing.
        message_bytes: n.
        ranks: P.

    Source: docs/modelling.md 4 and 6: the loaded curve at the gradient's own size.
    """
    return 0.0 if ranks <= 1 else table.at(bytes=message_bytes, ranks=float(ranks))


def ring_seconds(
    message_bytes: float, ranks: int, latency_seconds: float, bytes_per_second: float
) -> float:
    """Ring all-reduce: 2 (P - 1) messages of n / P bytes each.

    T = 2 (P - 1) (a + n / (P B))

    Args:
        message_bytes: n.
        ranks: P.
        latency_seconds: a, per message.
        bytes_per_second: B, per direction of a link.

    Source: docs/formulas.md 8.3 [A3].

    >>> round(ring_seconds(4e6, 8, 10e-6, 100e9) * 1e6)
    210
    """
    if ranks <= 1:
        return 0.0
    return 2 * (ranks - 1) * (latency_seconds + message_bytes / (ranks * bytes_per_second))


def hierarchical_seconds(
    message_bytes: float,
    *,
    devices: int,
    hosts: int,
    device_latency_seconds: float,
    device_bytes_per_second: float,
    host_latency_seconds: float,
    nic_bytes_per_second: float,
) -> float:
    """All-reduce inside hosts, then between them over a NIC shared by each host's devices.

    T = 2 (g - 1) (a1 + n / (g B1)) + 2 (H - 1) (a2 + n / (g H) / (NIC / g))

    Source: docs/formulas.md 8.3 [A3].

    >>> t = hierarchical_seconds(4e6, devices=4, hosts=2, device_latency_seconds=10e-6,
    ...     device_bytes_per_second=100e9, host_latency_seconds=30e-6, nic_bytes_per_second=25e9)
    >>> round(t * 1e6)
    340
    """
    inside = 2 * (devices - 1)
    inside_seconds = inside * (
        device_latency_seconds + message_bytes / (devices * device_bytes_per_second)
    )
    share = message_bytes / (devices * hosts) / (nic_bytes_per_second / devices)
    return inside_seconds + 2 * (hosts - 1) * (host_latency_seconds + share)


def exposed_bucket_seconds(
    ready_seconds: Sequence[float], bucket_seconds: Sequence[float]
) -> float:
    """Communication left over after the last gradient is ready.

    f_k = max(f_{k-1}, r_k) + T_k;  exposed = max(0, f_K - r_K)

    Args:
        ready_seconds: r_k, when bucket k's last gradient is ready, in backward order.
        bucket_seconds: T_k, all-reduce seconds of bucket k.

    Source: docs/formulas.md 8.3 [A3].

    >>> t = [ring_seconds(n, 4, 10e-6, 10e9) for n in (25e6, 5e6)]
    >>> round(exposed_bucket_seconds([5e-3, 10e-3], t) * 1e3, 2)
    0.81
    """
    finished = 0.0
    for ready, seconds in zip(ready_seconds, bucket_seconds, strict=True):
        finished = max(finished, ready) + seconds
    return max(0.0, finished - ready_seconds[-1])


def exposed_seconds(comm_seconds: float, hidden_seconds: float, eta: float) -> float:
    """Communication not hidden by computation that runs beside it.

    exposed = max(0, T_comm - eta * T_hidden), eta = 0 where it was not measured.

    Source: docs/modelling.md 5.

    >>> exposed_seconds(6.0, 10.0, 0.5), exposed_seconds(6.0, 0.0, 0.5)
    (1.0, 6.0)
    """
    return max(0.0, comm_seconds - eta * hidden_seconds)
