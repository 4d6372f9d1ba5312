"""Evaluate each new checkpoint of a training run, in a process beside it that reads what each has new.

python examples/train_ctr.py --deltas --save-interval 100 --steps 100000 --output-dir runs/clicks &
python examples/evaluate.py runs/clicks

A line for each: "step 300  loss 0.5932  1,482 rows, 0.4 MB read in 0.02 s". It ends when no checkpoint has come for ten
minutes, or after that of --last-step; started again, it goes on with --after. It writes nothing to the output dir.
"""

from __future__ import annotations

import argparse

import torch
from click_log import generated_clicks, read_ratings
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from train_ctr import DeepFM

import recckpt

N_CLICKS = 20_000  # that each checkpoint is tried on


def loss_of(model: DeepFM, ids: Tensor, labels: Tensor) -> float:
    """Return the mean loss of clicks; in eval mode ids without a row read zeros, and get none."""
    with torch.no_grad():
        return binary_cross_entropy_with_logits(model.eval()(ids), labels).item()


def main(argv: list[str] | None = None) -> None:
    """Evaluate one checkpoint after another."""
    args = parse_args(argv)
    torch.set_num_threads(1)  # the trainer is at work beside
    data = read_ratings(args.ratings) if args.ratings else generated_clicks(args.seed)
    ids, labels = (torch.from_numpy(each[-N_CLICKS:]) for each in data)
    model = DeepFM()
    standby = recckpt.Standby(model)
    for checkpoint in recckpt.follow(args.output_dir, timeout_sec=args.timeout_sec, after=args.after, every_sec=0.2):
        report = standby.load(checkpoint)
        assert report is not None  # each checkpoint comes once
        n_rows, loss = sum(report.rows_taken.values()), loss_of(model, ids, labels)
        read = f"{n_rows:,} rows, {report.bytes_read / 1e6:.1f} MB read in {report.seconds:.2f} s"
        print(f"step {checkpoint.manifest.step}  loss {loss:.4f}  {read}", flush=True)
        if checkpoint.manifest.step == args.last_step:
            break


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", help="of the training run, a path or URL; it need not be there yet")
    parser.add_argument("--ratings", metavar="FILE", help="as of train_ctr.py")
    parser.add_argument("--seed", type=int, default=0, help="as of train_ctr.py")
    parser.add_argument("--timeout-sec", type=float, default=600, help="end when no checkpoint has come for so long")
    parser.add_argument("--after", type=int, metavar="STEP", help="pass over what is there up to this step")
    parser.add_argument("--last-step", type=int, metavar="STEP", help="end after the checkpoint of this step")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
