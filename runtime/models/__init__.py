"""GNN layers and models over torch_geometric.nn on rectangular blocks.

The order of a layer's sum and product is decided here, without torch: a planner prices the layer in
the order in which it will run.
"""

PER_ELEMENT = {"cpu": 14, "cuda": 28}
"""Multiply-adds that take as long as summing one element of a row, by device (DEC-68)."""


def product_comes_first(
    num_src: float,
    num_dst: float,
    num_edges: float,
    in_width: int,
    out_width: int,
    *,
    device: str,
    trains: bool,
    inner: bool,
) -> bool:
    """Return whether the product of all sources before the sum costs less than the sum before it.

    Costs are multiply-adds, forward and, where it `trains`, back; a summed element counts as
    `PER_ELEMENT` of the `device` ("cpu" or "cuda"). Back, each order takes one product for the
    weights, and another where the rows need a gradient (`inner`: not those of the first layer).
    Sums go back over the transformed rows in any case, over rows before the product only where
    those need it.

    >>> product_comes_first(100, 10, 58, 64, 8, device="cpu", trains=False, inner=False)
    False
    >>> product_comes_first(100, 10, 59, 64, 8, device="cpu", trains=False, inner=False)
    True
    """
    products, sums = 1, 1
    if trains:
        products, sums = 2 + inner, 1 + inner
    product, element = products * in_width * out_width, PER_ELEMENT[device] * num_edges
    after = num_dst * product + sums * element * in_width
    before = num_src * product + (1 + trains) * element * out_width
    return before < after
