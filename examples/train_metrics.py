"""Train the click model of train_ctr.py while Prometheus may read how it saves.

pip install 'recckpt[examples]'
python examples/train_metrics.py --steps 1000 --port 9464
curl -s localhost:9464/metrics | grep ^recckpt     # while it trains; it prints the same when it is done
"""

from __future__ import annotations

import argparse
from urllib.request import urlopen

import torch
from click_log import ClickLog, generated_clicks
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server
from train_ctr import Run


def main(argv: list[str] | None = None) -> None:
    """Train, resuming where an earlier run was, and print what Prometheus would read."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))  # recckpt needs nothing else
    server, _ = start_http_server(args.port, addr="127.0.0.1")
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    print(f"training; metrics at {url}", flush=True)
    run = Run(
        ClickLog(*generated_clicks(args.seed), args.batch_size, args.seed),
        args.output_dir,
        save_interval=args.save_interval,
        max_keep=2,
        seed=args.seed,
        deltas=True,
    )
    run.manager.restore()
    run.train(args.steps)
    with urlopen(url) as page:
        lines = page.read().decode().splitlines()
    print(*(line for line in lines if line.startswith("recckpt") and "_bucket" not in line), sep="\n")
    server.shutdown()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="train up to this step, 1000 unless told")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--output-dir", default="demo_output/train_metrics", help="path or URL of the checkpoints")
    parser.add_argument("--save-interval", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--port", type=int, default=0, help="of the metrics; a free one unless told")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up clicks, their order and the first weights")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
