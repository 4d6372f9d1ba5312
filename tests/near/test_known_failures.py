"""Failures that users of other near tiers have reported, each named by its report: here they cost what near.md says.

NVRx is https://github.com/NVIDIA/nvidia-resiliency-ext, Megatron https://github.com/NVIDIA/Megatron-LM, and LM
https://github.com/LMResiliency/lm-resiliency.
"""

import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from near.test_near_saves import begun, rows
from near.test_ranks import OTHERS, near_names, on_hosts, on_near_ranks, together, trained
from support.builders import flip_bit
from support.forked import in_fork
from support.killed import kill_at
from support.near_runs import NearRun, parts_of
from support.sweeps import mostly_slow
from torch import nn

from recckpt.storage.local_files import LocalDraft

NEWEST, BEFORE, BASE = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, {1: 1.0, 2: 2.0}
THREE, NAN = struct.pack("<f", 3), struct.pack("<f", float("nan"))
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool]


def restored(root, hosts):
    """Return the rows that ranks on these hosts restore together, and the step, which is that of all."""
    of_ranks = on_hosts(root, hosts, lambda run: (rows(run.restore()), run.manager.global_step))
    [step] = {step for _, step in of_ranks}
    return together(own for own, _ in of_ranks), step


class Narrow(nn.Module):
    """Values of narrow types, every byte of which comes up, those of NaN and infinity too."""

    def __init__(self, seed):
        super().__init__()
        drawn = torch.randint(
            0, 256, (len(NARROW), 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        for number, dtype in enumerate(NARROW):
            values = drawn[number] % 2 if dtype == torch.bool else drawn[number]
            self.register_buffer(f"b{number}", values.view(dtype))

    @property
    def content(self):
        return [buffer.view(torch.uint8).numpy().tobytes() for buffer in self.buffers()]


def test_nvrx_349_a_copy_has_each_byte_of_what_its_rank_wrote_whatever_the_dtype(tmp_path):
    """Copies of quantized weights had NaN while the files of the rank itself were right: 4,668 of 32,796 tensors."""

    def work(run):
        run.put(_1=1.0, **OTHERS).step().put(_2=float("nan"), _3=3.0).step()
        return run.counts

    assert on_hosts(tmp_path, ["a", "b"], work, dense=Narrow(0)) == [(1, 0, 0)] * 2
    [name] = near_names(tmp_path, "a")
    files = [path.relative_to(tmp_path / "a") for path in sorted((tmp_path / "a" / name).rglob("*")) if path.is_file()]
    assert len(files) > 10
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file

    for lost, left in ("ab", "ba"):
        (tmp_path / lost).rename(tmp_path / "away")
        dense = Narrow(1)
        [own] = on_hosts(tmp_path, [left], lambda run: rows(run.restore()), dense=dense)
        assert dense.content == Narrow(0).content
        assert own.keys() == {1, 2, 3}
        assert own[2] != own[2], "NaN comes back as NaN"
        shutil.rmtree(tmp_path / lost, ignore_errors=True)
        (tmp_path / "away").rename(tmp_path / lost)


@mostly_slow()
@pytest.mark.parametrize(("n_spoiled", "left", "step"), [(1, BEFORE, 2), (0, NEWEST, 3), (2, BASE, 1)])
def test_megatron_5281_a_damaged_copy_is_passed_over_at_each_restart(tmp_path, n_spoiled, left, step):
    """A job restored a damaged copy, since nothing looked at it, and did so again at each of 44 restarts."""
    on_hosts(tmp_path, ["a", "b"], trained)
    shutil.rmtree(tmp_path / "a")
    for name in near_names(tmp_path, "b")[2 - n_spoiled :]:
        [part] = [part for part in parts_of(tmp_path / "b" / name) if THREE in part.read_bytes()]
        part.write_bytes(part.read_bytes().replace(THREE, NAN))
    assert restored(tmp_path, ["b"]) == (left, step)
    assert restored(tmp_path, ["spare", "b"]) == (left, step)
    on_hosts(tmp_path, ["spare", "b"], lambda run: run.restore().put(_9=9.0).step())
    assert restored(tmp_path, ["spare", "b"]) == (left | {9: 9.0}, step + 1)


def test_lm_77_a_run_takes_nothing_of_another_of_the_same_model_and_near_dir(tmp_path):
    """Names had step and rank alone: a new job in the same directory went on from the highest step of an old one."""
    old, own = tmp_path / "old", tmp_path / "own"
    for root in (old, own):
        on_near_ranks(root, 2, lambda run, root=root: trained(run.put(_50=float(root == own))), near="../near")
    on_near_ranks(old, 2, lambda run: run.restore().put(_6=6.0).step().step(), near="../near")
    left = together(on_near_ranks(own, 2, lambda run: rows(run.restore()), near="../near"))
    assert left == NEWEST | {50: 1.0}
    assert rows(NearRun(tmp_path / "new", near="../near").restore()) == {}

    shutil.rmtree(own / "runs")
    assert rows(NearRun(own, near="../near").restore()) == {}, "the same path, and another run"


def test_lm_77_pieces_of_the_same_step_by_another_number_of_ranks_do_not_mix(tmp_path):
    on_near_ranks(tmp_path, 2, trained)
    shutil.copytree(tmp_path / "near", tmp_path / "old")
    on_near_ranks(tmp_path, 3, lambda run: run.restore(near=False).put(_7=7.0).step().step())
    assert NearRun(tmp_path).restore().manager.global_step == 3
    newest = NearRun(tmp_path).near_dirs[-1]
    for shard in range(3):
        for piece in newest.glob(f"sparse/0000{shard}*"):
            piece.unlink()
    for old in [seal.parent for seal in (tmp_path / "old").rglob("near.json")]:
        shutil.copytree(old, newest, dirs_exist_ok=True, ignore=lambda *_: ["near.json"])
    assert rows(NearRun(tmp_path).restore()) == BASE | {7: 7.0}, "the one before, of three ranks"


@mostly_slow()
@pytest.mark.parametrize("number", range(10, 20))
def test_lm_85_a_death_while_a_copy_is_written_leaves_no_half_of_a_file(tmp_path, number):
    """Copies were written in place: after a crash a half of one stood for the whole, and nothing older was tried."""
    torch.set_num_threads(1)

    def life():
        kill_at(number, [(LocalDraft, "close")])
        on_hosts(tmp_path, ["a", "b"], trained)

    assert in_fork(life) == "", "it was killed"
    for path in (tmp_path / "a").rglob("*.*"):
        twin = tmp_path / "b" / path.relative_to(tmp_path / "a")
        if path.is_file() and twin.exists():
            assert path.read_bytes() == twin.read_bytes()
    left, step = restored(tmp_path, ["a", "b"])
    assert left == [{}, BASE, BEFORE, NEWEST][step]
    on_hosts(tmp_path, ["a", "b"], lambda run: run.restore().put(_9=9.0).step().step())
    assert not list(tmp_path.glob("?/recckpt-near/**/*.tmp"))


def test_lm_85_ranks_go_back_to_a_save_that_is_whole_on_all_of_them(tmp_path):
    """The newest step of each rank was compared, and the smallest taken, whether all had it or not."""
    on_hosts(tmp_path, ["a", "b"], trained, copies=0)
    older, newer = near_names(tmp_path, "a")
    part = parts_of(tmp_path / "b" / newer)[0]
    os.truncate(part, part.stat().st_size - 1)
    assert restored(tmp_path, ["a", "b"]) == (BEFORE, 2)
    (tmp_path / "a" / older / "near.json").unlink()
    shutil.rmtree(tmp_path / "b" / older / "sparse")
    assert restored(tmp_path, ["a", "b"]) == (BASE, 1)


def test_lm_32_one_bad_shard_is_passed_over_by_all_ranks_together(tmp_path):
    """The rank with a damaged shard went back alone; the others went on with the newer step."""
    on_hosts(tmp_path, ["a", "b", "c"], trained, copies=0)
    newest = near_names(tmp_path, "c")[-1]
    flip_bit(next((tmp_path / "c" / newest).glob("sparse/00002*.json")))
    assert restored(tmp_path, ["a", "b", "c"]) == (BEFORE, 2)


def test_lm_32_the_copy_of_a_peer_is_never_taken_for_what_is_missing(tmp_path):
    """A rank without a shard of its own took that of its peer, which it had a copy of, with the same step."""
    on_hosts(tmp_path, ["a", "b"], trained)
    newest = near_names(tmp_path, "a")[-1]
    for host in "ab":
        for own in (tmp_path / host / newest).glob("sparse/00001*"):
            peer = own.with_name(own.name.replace("00001-", "00000-"))
            own.unlink()
            if peer.exists():
                shutil.copy(peer, own)
    assert restored(tmp_path, ["a", "b"]) == (BEFORE, 2)


def test_lm_32_nothing_in_a_damaged_file_is_run(tmp_path):
    """Files were unpickled before anything was checked."""

    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harmed",)

    run = begun(tmp_path).put(_3=3.0).step()
    harm = pickle.dumps(Harm())
    for path in [path for path in run.near_dirs[-1].glob("*") if path.suffix in (".pt", ".json")]:
        kept = path.read_bytes()
        for data in (harm, harm.ljust(len(kept), b"\0")):
            path.write_bytes(data)
            assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}
        path.write_bytes(kept)
    assert not (tmp_path / "harmed").exists()
