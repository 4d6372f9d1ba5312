"""Train the click model of train_ctr.py with Lightning; run again, it goes on where it was.

pip install 'recckpt[lightning]' torchdata
python examples/train_lightning.py --steps 1000
python examples/train_lightning.py --steps 2000    # goes on at step 1000
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from click_log import generated_clicks
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from train_ctr import DeepFM

from recckpt.integrations.lightning import LightningCallback
from recckpt.recis import filter_out_sparse_param
from recckpt.sparse import SparseAdamW


class ClickModel(pl.LightningModule):
    """The dense optimizer is Lightning's; that of the tables is found and stepped by the callback."""

    def __init__(self) -> None:
        super().__init__()
        self.model = DeepFM()
        self.sparse_optim = SparseAdamW(filter_out_sparse_param(self.model), lr=0.01)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        ids, labels = batch
        loss = binary_cross_entropy_with_logits(self.model(ids), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the dense part."""
        return torch.optim.Adam(self.model.parameters(), lr=0.001)


def main() -> None:
    """Train up to a step, from the newest checkpoint on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/lightning")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-interval", type=int, default=250)
    args = parser.parse_args()
    pl.seed_everything(0)
    ids, labels = generated_clicks(seed=0)
    data = TensorDataset(torch.as_tensor(ids), torch.as_tensor(labels))
    checkpoints = LightningCallback(args.output_dir, args.save_interval, save_on_signal=("SIGTERM",))
    trainer = pl.Trainer(
        max_steps=args.steps,
        callbacks=[checkpoints],
        enable_checkpointing=False,
        logger=False,
        accelerator="auto",
    )
    trainer.fit(ClickModel(), StatefulDataLoader(data, batch_size=256, shuffle=True))
    print(f"step {trainer.global_step}, kept: {args.output_dir}")


if __name__ == "__main__":
    main()
