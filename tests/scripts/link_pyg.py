import torch
import torch.nn.functional as F
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.nn import GraphSAGE

data = torch.load("data.pt", weights_only=False)
torch.manual_seed(0)
kwargs = {"num_neighbors": [10, 5], "batch_size": 256, "neg_sampling": "binary"}
train_loader = LinkNeighborLoader(data, edge_label_index=data.train_pos, shuffle=True, **kwargs)
val_loader = LinkNeighborLoader(data, edge_label_index=data.val_pos, **kwargs)
model = GraphSAGE(data.num_features, 32, num_layers=2, out_channels=32)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def score(batch):
    h = model(batch.x, batch.edge_index)
    source, destination = batch.edge_label_index
    return (h[source] * h[destination]).sum(dim=-1)


for epoch in range(3):
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(score(batch), batch.edge_label.float())
        loss.backward()
        optimizer.step()
model.eval()
positive, negative = [], []
with torch.no_grad():
    for batch in val_loader:
        found = score(batch)
        positive.append(found[batch.edge_label == 1])
        negative.append(found[batch.edge_label == 0])
positive, negative = torch.cat(positive), torch.cat(negative)
print(f"val {(positive[:, None] > negative[None, :]).float().mean():.4f} of {len(positive)}")
