import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

from gnnplan import PlannedLoader

data = torch.load("data.pt", weights_only=False)
pl.seed_everything(0)
kwargs = {"num_neighbors": [10, 5], "batch_size": 64}
train_loader = PlannedLoader("my-plan", blocks=False, shuffle=True, **kwargs)
val_loader = train_loader.over(data.val_mask, **kwargs)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.gnn = GraphSAGE(data.num_features, 32, 2, int(data.y.max()) + 1)
        self.right = self.seen = 0

    def training_step(self, batch, batch_idx):
        out = self.gnn(batch.x, batch.edge_index)[: batch.batch_size]
        return F.cross_entropy(out, batch.y[: batch.batch_size])

    def validation_step(self, batch, batch_idx):
        out = self.gnn(batch.x, batch.edge_index)[: batch.batch_size]
        self.right += int((out.argmax(-1) == batch.y[: batch.batch_size]).sum())
        self.seen += batch.batch_size

    def on_validation_epoch_start(self):
        self.right = self.seen = 0

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


model = Model()
trainer = pl.Trainer(
    max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, train_loader, val_loader)
print(f"val {model.right / model.seen:.4f} of {model.seen}")
