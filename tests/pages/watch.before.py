"""The page looks at the run of the quick start, which has just saved, and measures a saver of the reader's."""

import torch

from recckpt import Saver
from recckpt.sparse import HashTable

go_on_after("README.md")
saver = Saver(torch.nn.ModuleDict({"item": HashTable(8, name="item")}), output_dir="runs/metrics")
