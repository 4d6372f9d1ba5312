"""The page scales the loss of a model of the reader's, with two optimizers."""

import torch

from recckpt.sparse import HashTable, SparseAdam

net = torch.nn.ModuleDict({"item": HashTable(4, name="item"), "top": torch.nn.Linear(4, 1)})
sparse_optim = SparseAdam([net["item"]])
dense_optim = torch.optim.Adam(net.parameters())
scaler = torch.amp.GradScaler("cpu")
loss = net["top"](net["item"](torch.arange(4))).mean()
