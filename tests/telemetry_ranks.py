"""What real ranks do for test_telemetry.py: run it as ``telemetry_ranks.py ROOT SIZE``."""

import sys
from pathlib import Path

import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.rank_processes import fork_ranks
from torch import nn

from recckpt import Saver, telemetry
from recckpt.errors import SaveFailedError
from recckpt.sparse import HashTable, gen_slice


def work(rank, size, root):
    """Save, save what the last rank cannot, and load; return the spans of this rank."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    telemetry._tools.cache_clear()
    table = HashTable(4, name="t", slice=gen_slice(rank, size))
    ids = torch.arange(100)
    table(ids[table.slice.owns(ids)])
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(root / "run"))
    saver.save_async("a").wait()
    try:
        saver.save("b", state={"x": object()} if rank else None)
    except (SaveFailedError, ValueError):
        saver.load("a")
    ended = exporter.get_finished_spans()
    return [(span.name, span.status.status_code.name, span.attributes.get("recckpt.rows")) for span in ended]


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(int(sys.argv[2]), Path(sys.argv[1]), work)
