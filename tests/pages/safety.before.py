"""The page speaks of a model, a loader and a training step that the reader has."""

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, SparseAdam

model = torch.nn.ModuleDict({"item": HashTable(4, name="item"), "top": torch.nn.Linear(4, 1)})
sparse_optim = SparseAdam([model["item"]])
dense_optim = torch.optim.Adam(model.parameters())
manager = CheckpointManager(Saver(model, sparse_optim, "runs/safety"), save_interval=100)
loader = StatefulDataLoader(range(40), batch_size=4)
scaler = torch.amp.GradScaler("cpu")
loss = model["top"](model["item"](torch.arange(4))).mean()


def train(batch):
    model["top"](model["item"](batch)).sum()
