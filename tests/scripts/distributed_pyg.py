import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE


def run(rank, world_size, data):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    train_idx = data.train_mask.nonzero(as_tuple=False).view(-1)
    train_idx = train_idx.split(train_idx.size(0) // world_size)[rank]
    kwargs = {"batch_size": 64, "num_neighbors": [10, 5]}
    train_loader = NeighborLoader(data, input_nodes=train_idx, shuffle=True, **kwargs)
    if rank == 0:
        val_loader = NeighborLoader(data, input_nodes=data.val_mask, **kwargs)
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 32, num_layers=2, out_channels=int(data.y.max()) + 1)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(8):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
        dist.barrier()
    if rank == 0:
        model.eval()
        correct = total = 0
        with torch.no_grad():
            for batch in val_loader:
                out = model.module(batch.x, batch.edge_index)[: batch.batch_size]
                correct += int((out.argmax(-1) == batch.y[: batch.batch_size]).sum())
                total += batch.batch_size
        print(f"val {correct / total:.4f} of {total}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(2, torch.load("data.pt", weights_only=False)), nprocs=2, join=True)
