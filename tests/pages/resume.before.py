"""A shell that has other programs in the place of those that take long, and a run of the reader's with a loader."""

import os
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable

Path("bin").mkdir()
for name in ("python", "sleep"):
    program = Path("bin", name)
    program.write_text(f'#!/bin/sh\necho "{name} $*" >> calls\n[ {name} = sleep ] || [ "$(wc -l < calls)" -ge 5 ]\n')
    program.chmod(0o755)
os.environ["PATH"] = f"{Path('bin').absolute()}:{os.environ['PATH']}"

item = HashTable(4, name="item")
manager = CheckpointManager(Saver(torch.nn.ModuleDict({"item": item}), output_dir="runs/loaders"), save_interval=100)
loader = StatefulDataLoader(range(40), batch_size=4)
train_on = item
