"""GNN layers and models over torch_geometric.nn on rectangular blocks."""
