import torch
import torch.nn.functional as F
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv

data = torch.load("data.pt", weights_only=False)
torch.manual_seed(0)
kwargs = {"batch_size": 64, "num_workers": 2, "persistent_workers": True}
train_loader = NeighborLoader(
    data, num_neighbors=[10, 5], input_nodes=data.train_mask, shuffle=True, **kwargs
)
subgraph_loader = NeighborLoader(data, num_neighbors=[-1], input_nodes=None, **kwargs)


class SAGE(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            [SAGEConv(in_channels, hidden_channels), SAGEConv(hidden_channels, out_channels)]
        )

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = F.dropout(x.relu(), p=0.2, training=self.training)
        return x

    @torch.no_grad()
    def inference(self, x_all, loader):
        for i, conv in enumerate(self.convs):
            xs = []
            for batch in loader:
                x = conv(x_all[batch.n_id], batch.edge_index)[: batch.batch_size]
                xs.append(x.relu() if i < len(self.convs) - 1 else x)
            x_all = torch.cat(xs, dim=0)
        return x_all


model = SAGE(data.num_features, 32, int(data.y.max()) + 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(8):
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
model.eval()
pred = model.inference(data.x, subgraph_loader).argmax(dim=-1)
for name in ("train", "val", "test"):
    mask = data[f"{name}_mask"]
    print(f"{name} {(pred[mask] == data.y[mask]).float().mean():.4f}")
