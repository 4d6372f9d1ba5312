"""The page begins with a model that has tables."""

import torch

from recckpt.sparse import HashTable

model = torch.nn.ModuleDict({"user": HashTable(4, name="user")})
