"""The page speaks of a model and a loss scaler that the reader has."""

import torch

from recckpt.sparse import HashTable, SparseAdam

model = torch.nn.ModuleDict({"item": HashTable(4, name="item"), "top": torch.nn.Linear(4, 1)})
sparse_optim = SparseAdam([model["item"]])
dense_optim = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cpu")
loss = model["top"](model["item"](torch.arange(4))).mean()
