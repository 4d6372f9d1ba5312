"""The names of the files of a RecIS checkpoint: only this file makes and parses them."""

from __future__ import annotations

import re

INDEX, TENSOR_KEYS = "index", "tensorkey.json"
MODEL, EXTRA, N_POSITIONS = "model.pt", "extra.pt", "io_state_count"
SERVING = "torch_rank_weights_embs_table_multi_shard.json"
ONE_SHARD = "model-000000-of-000000.safetensors"
SHARD = re.compile(r"(.*/)?model-\d{6}-of-\d{6}\.safetensors", re.ASCII)
STEP_DIR = re.compile(r"ckpt_(\d{1,18})", re.ASCII)
POSITIONS = re.compile(r"io_state_(\d{1,9})\.pt")


def positions_of(rank: int) -> str:
    """Return the name of the file with the dataset positions of a rank."""
    return f"io_state_{rank}.pt"
