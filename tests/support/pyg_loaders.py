"""PyG's own loaders over our sampler, since pyg-lib is not to be had: what scripts ran before."""

from typing import Any

from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, NodeLoader

from gnnplan.runtime.sampling.exclusion import Exclude
from gnnplan.runtime.sampling.pyg_sampler import PygSampler


def NeighborLoader(data: Data, num_neighbors: list[int], **settings: Any) -> NodeLoader:  # noqa: N802
    """PyG's NeighborLoader."""
    return NodeLoader(data, PygSampler.from_data(data, num_neighbors), **settings)


def LinkNeighborLoader(data: Data, num_neighbors: list[int], **settings: Any) -> LinkLoader:  # noqa: N802
    """PyG's LinkNeighborLoader, which leaves seed links in the graph."""
    sampler = PygSampler.from_data(data, num_neighbors, exclude=Exclude.NONE)
    return LinkLoader(data, sampler, **settings)
