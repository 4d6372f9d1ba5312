"""The page begins with the two calls that the rest of it is about, of a model and a bank of the reader's."""

import torch

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable

Saver(torch.nn.ModuleDict({"user": HashTable(4, name="user")}), output_dir="runs/other").save("ckpt_1", step=1)
saver = Saver(torch.nn.ModuleDict({"user": HashTable(4, name="user")}), output_dir="runs/own")
bank = [{"path": "runs/other"}]
