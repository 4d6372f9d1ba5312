"""The garbage collector runs rarely while something is loaded, and as before afterwards."""

import gc

import pytest
import torch
from torch import nn

from recckpt import Saver
from recckpt.parallel.collector import collected_rarely
from recckpt.sparse import HashTable


@pytest.fixture(autouse=True)
def _thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_it_runs_rarely_within_and_as_before_after_an_error():
    gc.set_threshold(700, 10, 10)
    with pytest.raises(KeyError), collected_rarely():
        assert gc.get_threshold() == (100_000, 10, 10)
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)


def test_blocks_may_overlap_and_the_last_one_puts_it_back():
    gc.set_threshold(700, 10, 10)
    one, other = collected_rarely(), collected_rarely()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold() == (100_000, 10, 10)
    other.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (500_000, 5, 5)], ids=["off", "higher"])
def test_what_a_program_has_chosen_for_fewer_runs_stays(own):
    gc.set_threshold(*own)
    with collected_rarely():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_what_a_program_sets_meanwhile_stays():
    with collected_rarely():
        gc.set_threshold(900, 9, 9)
    assert gc.get_threshold() == (900, 9, 9)


def test_a_load_makes_it_run_rarely_until_its_end(tmp_path):
    class Looks(dict):
        def load_state_dict(self, state):
            self.seen = gc.get_threshold()

        def state_dict(self):
            return {}

    gc.set_threshold(700, 10, 10)
    table, looks = HashTable(4, name="item"), Looks()
    table.insert(torch.arange(3), torch.rand(3, 4))
    with Saver(nn.ModuleDict({"item": table}), output_dir=tmp_path) as saver:
        saver.register_for_checkpointing("looks", looks)
        saver.save("c", step=1)
        saver.load()
    assert looks.seen == (100_000, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)
