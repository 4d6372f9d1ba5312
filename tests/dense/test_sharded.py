"""Tensors of several ranks, as far as one process shows it: those that say by attributes where their shards lie."""

import pytest
import torch
from support.checkpointable import PADDING, Sharded, describe, local_of
from torch import nn

from recckpt import CheckpointReader, Saver
from recckpt.dense.sharded import Share, Tile, check_shares, is_sharded, own_shards
from recckpt.errors import SaveFailedError, StateMismatchError

WHOLE = torch.arange(12.0).reshape(6, 2)
SPANS = [(4, 6), (0, 4)]  # of this one process, in another order than in the whole


class Model(nn.Module):
    def __init__(self, *, whole=WHOLE, spans=SPANS, kind=torch.Tensor):
        super().__init__()
        local = local_of(whole, spans).as_subclass(kind)
        self.w = nn.Parameter(describe(local, whole, spans))
        if not hasattr(self.w, "global_shape"):  # torch's own class drops attributes
            describe(self.w, whole, spans)


@pytest.mark.parametrize("kind", [torch.Tensor, Sharded])
def test_the_whole_is_what_is_saved_and_each_part_goes_back_to_its_place(tmp_path, kind):
    Saver(Model(kind=kind), output_dir=tmp_path).save("c")
    with CheckpointReader(tmp_path) as reader:
        assert reader.tensor_shape("w") == (6, 2)
        assert reader.read_tensor("w").tolist() == WHOLE.tolist()
    other = Model(whole=torch.zeros(6, 2), spans=[(0, 1), (1, 6)], kind=kind)
    with torch.no_grad():
        other.w[:PADDING] = 7
    Saver(other, output_dir=tmp_path / "unused").load(tmp_path)
    assert torch.equal(other.w.detach().as_subclass(torch.Tensor), local_of(WHOLE, [(0, 1), (1, 6)], padding=7))
    assert other.w.global_offsets == ((0, 0), (1, 0))


def test_a_plain_tensor_and_such_a_one_load_each_other(tmp_path):
    plain = nn.Module()
    plain.w = nn.Parameter(WHOLE.clone())
    adam = torch.optim.Adam(plain.parameters())
    plain.w.grad = torch.ones(6, 2)
    adam.step()
    saver = Saver(plain, output_dir=tmp_path / "plain")
    saver.register_for_checkpointing("adam", adam)
    saver.save("c")
    model = Model(whole=torch.zeros(6, 2))
    of_model = torch.optim.Adam(model.parameters())
    saver = Saver(model, output_dir=tmp_path / "parts")
    saver.register_for_checkpointing("adam", of_model)
    saver.load(tmp_path / "plain")
    assert torch.equal(model.w.detach(), local_of(plain.w.detach(), SPANS))
    assert torch.equal(of_model.state[model.w]["exp_avg"], local_of(adam.state[plain.w]["exp_avg"], SPANS, padding=0))
    saver.save("c")
    again = nn.Module()
    again.w = nn.Parameter(torch.zeros(6, 2))
    Saver(again, output_dir=tmp_path / "unused").load(tmp_path / "parts")
    assert torch.equal(again.w, plain.w)


def test_another_shape_of_the_whole_is_a_mismatch_that_names_both(tmp_path):
    Saver(Model(), output_dir=tmp_path).save("c")
    other = Model(whole=torch.zeros(5, 2), spans=[(0, 5)])
    with pytest.raises(StateMismatchError) as caught:
        Saver(other, output_dir=tmp_path / "unused").load(tmp_path)
    assert caught.value.mismatched == {"w": ("float32 (6, 2)", "float32 (5, 2)")}


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("global_shape", (6,)),
        ("global_shape", (5, 2)),
        ("global_offsets", ((4, 0),)),
        ("global_offsets", ((4, 0), (-1, 0))),
        ("local_offsets", ((1, 0), (4, 0))),
        ("local_sizes", ((2, 2), (4, 3))),
        ("local_sizes", ((2, 2), (4,))),
        ("global_shape", 6),
        ("global_shape", None),
        ("global_shape", (6.0, 2)),
        ("global_offsets", (4, 0)),
        ("local_offsets", "no"),
    ],
)
def test_attributes_that_contradict_the_tensor_or_each_other_are_refused_by_name(tmp_path, attribute, value):
    model = Model()
    setattr(model.w, attribute, value)
    with pytest.raises(ValueError, match=r"w: found global_shape .* of a tensor \(7, 2\), expected shards inside both"):
        Saver(model, output_dir=tmp_path).save("c")
    assert not (tmp_path / "c/manifest.json").exists()


def test_a_whole_without_values_of_which_no_rank_has_a_shard_is_saved_and_loaded(tmp_path):
    model = Model(whole=torch.zeros(0, 2), spans=[])
    Saver(model, output_dir=tmp_path).save("c")
    assert CheckpointReader(tmp_path).tensor_shape("w") == (0, 2)
    Saver(Model(whole=torch.zeros(0, 2), spans=[(0, 0)]), output_dir=tmp_path).load()
    other = Model(whole=torch.zeros(3, 2), spans=[])
    with pytest.raises(StateMismatchError, match=r"'w': found float32 \(0, 2\), expected float32 \(3, 2\)"):
        Saver(other, output_dir=tmp_path).load()
    with pytest.raises(SaveFailedError, match="sharded tensor w: found 0 values on 1 ranks, expected 6"):
        Saver(other, output_dir=tmp_path / "other").save("c")


def test_shards_that_cover_a_value_twice_are_refused_though_their_number_is_right(tmp_path):
    share = Share("float32", (4, 2), 4, (Tile((1, 0), (2, 2)),))
    other = Share("float32", (4, 2), 4, (Tile((2, 0), (2, 2)),))
    with pytest.raises(
        ValueError, match=r"sharded tensor w: found \(2, 2\) from .* which another shard also has in part"
    ):
        check_shares([{"model/w": share}, {"model/w": other}])
    check_shares(
        [{"model/w": share}, {"model/w": Share("float32", (4, 2), 4, (Tile((0, 0), (1, 2)), Tile((3, 0), (1, 2))))}]
    )
    with pytest.raises(ValueError, match="several ranks have the same part"):
        check_shares([{"model/w": Share("float32", (4, 2), 8)}, {"model/w": Share("float32", (4, 2), 8)}])


def test_all_four_attributes_make_one_and_three_do_not():
    tensor = describe(local_of(WHOLE, SPANS), WHOLE, SPANS)
    assert is_sharded(tensor)
    assert [offsets for offsets, _ in own_shards("w", tensor)] == [(4, 0), (0, 0)]
    del tensor.local_sizes
    assert not is_sharded(tensor)
    assert own_shards("w", tensor) is None
    assert not is_sharded(WHOLE)
