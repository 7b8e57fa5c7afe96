"""How much memory there is, and whether arrays of one value per node can be held in it."""

from runtime.device import usable_ram_bytes
from runtime.errors import DatasetError

BYTES_PER_NODE = 16


def memory_bytes() -> int:
    """Bytes of memory this process may use: what imports and plans alike go by."""
    return usable_ram_bytes()


def check_num_nodes(num_nodes: int) -> None:
    """Refuse a node count (often a damaged one) whose per-node arrays do not fit the memory.

    Raises:
        DatasetError: it would take more than half of the memory.
    """
    usable = memory_bytes() // 2
    if num_nodes * BYTES_PER_NODE > usable:
        raise DatasetError(
            f"expected a number of nodes whose arrays fit in memory, found {num_nodes} nodes * "
            f"{BYTES_PER_NODE} bytes = {num_nodes * BYTES_PER_NODE / 1e9:.1f} GB > "
            f"{usable / 1e9:.1f} GB usable"
        )
