"""The workers of a real Dask cluster compact, one of them killed on the way, and verify."""

import os
import signal
import threading
from pathlib import Path

import pytest
from support import documents
from support.builders import Run, flip_bit
from support.delta_runs import rows_of, run_with_chain

import recckpt
from recckpt import Deltas
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import locate
from recckpt.rewrite import whole

distributed = pytest.importorskip("distributed", reason="NO DASK HERE: NOTHING IS KNOWN OF CLUSTERS")


@pytest.fixture(scope="module")
def client():
    """A cluster of two processes."""
    support = {
        "PYTHONPATH": os.pathsep.join([str(Path(recckpt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    }
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", processes=True, env=support
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(whole, "LEAST_PART_BYTES", 100)  # many parts
    return run_with_chain(tmp_path / "runs")


def check(run, directory) -> None:
    expected = rows_of(run, "ckpt_3")
    assert locate(run, "ckpt_3").directory == directory
    assert verify(f"{run.url}/{directory}") == []
    assert rows_of(run, "ckpt_3") == expected


@pytest.mark.slow
def test_the_workers_of_a_cluster_do_the_work(client, run):
    done = recckpt.rewrite.compact(run.url, executor=client.get_executor(), adopt=True)
    check(run, done.directory)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing_but_time(client, run):
    pids = list(client.run(os.getpid).values())
    executor, begun, killed = client.get_executor(), threading.Event(), threading.Event()

    def kill() -> None:
        begun.wait()
        os.kill(pids[0], signal.SIGKILL)
        killed.set()

    killer = threading.Thread(target=kill)
    killer.start()
    submit = executor.submit

    def submit_and_kill(work, *args):
        future = submit(work, *args)
        future.add_done_callback(lambda _: begun.set())
        return future

    executor.submit = submit_and_kill
    done = recckpt.rewrite.compact(run.url, executor=executor, adopt=True)
    assert killed.wait(60)
    killer.join()
    check(run, done.directory)


@pytest.mark.slow
def test_what_the_pages_do_on_a_cluster_runs_as_it_stands(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Run("runs/clicks", deltas=Deltas(max_chain_bytes=9.0, max_dirty=1.0)).train(20)
    blocks = [block for page in ("deltas.md", "does-not-resume.md") for block in documents.blocks(page)]
    names = {"client": client}
    exec("\n".join(block.text for block in blocks if "client.get_executor()" in block.text), names)
    assert "verify" in names
    assert (names["done"].ckpt_id, names["done"].n_links) == ("ckpt_20", 2)


@pytest.mark.slow
def test_the_workers_of_a_cluster_verify_what_a_process_would(client, run):
    directory = recckpt.rewrite.compact(run.url, out=f"{run.url} whole").directory
    part = next(Path(f"{run.url} whole", directory).glob("sparse/*.arrow"))
    assert verify(f"{run.url} whole", executor=client.get_executor()) == []
    flip_bit(part)
    found = verify(f"{run.url} whole", executor=client.get_executor())
    assert found == verify(f"{run.url} whole") != []
    part.unlink()
    assert verify(f"{run.url} whole", executor=client.get_executor()) == verify(f"{run.url} whole") != []
