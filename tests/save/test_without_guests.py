"""A saver without the guest that forgets ids: a request on disk binds it all the same."""

import secrets
from dataclasses import replace

import numpy as np
import pytest
from support.forgetting import ForgettingRun, ids_at

from recckpt.errors import RecckptError
from recckpt.format.forgetting import Request
from recckpt.output_dir.forget_requests import put_request
from recckpt.output_dir.listing import list_checkpoints
from recckpt.rewrite.forgetting import finish
from recckpt.save.job import ForgetsNothing
from recckpt.storage import open_storage


def test_a_saver_that_cannot_forget_saves_nothing_while_a_request_waits(tmp_path):
    run, storage = ForgettingRun(tmp_path).save_chain(), open_storage(str(tmp_path))
    put_request(storage, Request(secrets.token_hex(16), "user", np.array(ids_at(5)), "now", "a test", "1"))
    alone = ForgettingRun(tmp_path)
    alone.saver._to = replace(alone.saver._to, forgets=ForgetsNothing())
    before = list_checkpoints(storage).ckpt_ids
    with pytest.raises(RecckptError, match=r"not ended.*run `recckpt forget DIR` first"):
        alone.saver.save("ckpt_5", step=5)
    assert list_checkpoints(storage).ckpt_ids == before
    finish(str(tmp_path))
    alone = ForgettingRun(tmp_path)
    alone.saver._to = replace(alone.saver._to, forgets=ForgetsNothing())
    alone.saver.save("ckpt_5", step=5)
    assert list_checkpoints(storage).ckpt_ids == [*before, "ckpt_5"]
    assert run.saver is not alone.saver


def test_a_saver_that_cannot_forget_says_so(tmp_path):
    run = ForgettingRun(tmp_path).save_chain()
    with pytest.raises(RecckptError, match="cannot forget ids of 'user': use `recckpt forget DIR`"):
        ForgetsNothing().check(run.saver.storage, list_checkpoints(run.saver.storage), "user", ids_at(5), is_live=True)
