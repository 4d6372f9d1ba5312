"""A cluster of programs that say how they were called, and a saver of the reader's."""

import os
from pathlib import Path

import torch

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable

saver = Saver(torch.nn.ModuleDict({"user": HashTable(4, name="user")}), output_dir="runs/clicks")
PROGRAMS = {
    "srun": 'case "$1" in --*) shift;; esac\nSLURM_PROCID=1 SLURM_NTASKS=2 "$@"',
    "scontrol": '[ "$1" = show ] && { echo host-0; echo host-1; exit; }\necho "scontrol $*" >> calls',
    "python": 'echo "python $* of $RANK of $WORLD_SIZE at $MASTER_ADDR" >> calls\nexit "${CODE:-0}"',
}
Path("bin").mkdir()
for name, text in PROGRAMS.items():
    Path("bin", name).write_text(f"#!/bin/sh\n{text}\n")
    Path("bin", name).chmod(0o755)
os.environ.update(
    PATH=f"{Path('bin').absolute()}:{os.environ['PATH']}", SLURM_JOB_ID="17", SLURM_JOB_NODELIST="host-[0-1]"
)
