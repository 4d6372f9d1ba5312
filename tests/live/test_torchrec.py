"""Collections as only GPUs have them, by stand-ins for TorchRec's: left dense by name, with what to do."""

import pytest
from support.fake_fbgemm import SplitTableBatchedEmbeddingBagsCodegen, SSDTableBatchedEmbeddingBags
from support.fake_torchrec import DMPCollection, ShardedEmbeddingBagCollection
from support.thread_ranks import ThreadGroup, Wire, alone
from torch import nn

from recckpt.errors import LiveTableError
from recckpt.live import live_tables
from recckpt.live.find import find_tables
from recckpt.parallel.threads import run_all


def collection(kernel=None, **options):
    return ShardedEmbeddingBagCollection(kernel or SplitTableBatchedEmbeddingBagsCodegen([(40, 2)]), **options)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            collection(stash_weights=True),
            "its weights are stashed in forward passes, which frees what a save still reads: make it without stash_we",
        ),
        (
            collection(SSDTableBatchedEmbeddingBags()),
            "its kernel is a SSDTableBatchedEmbeddingBags: plan it with the compute kernel FUSED or FUSED_UVM_CACHING",
        ),
        (DMPCollection(collection()), "its replicas differ until DMPCollection.sync(): use DistributedModelParallel"),
    ],
)
def test_what_only_gpus_have_and_cannot_be_saved_by_rows_stays_dense_and_says_why(module, why):
    tables = live_tables(nn.ModuleDict({"sparse": module}), min_rows=1)
    assert len(tables) == 0
    assert f"embedding_bags.t: {why}" in str(tables)


def test_rows_that_no_rank_has_are_refused_unless_the_table_is_excluded():
    model = nn.ModuleDict({"sparse": collection(SplitTableBatchedEmbeddingBagsCodegen([(30, 2)]))})
    path = "sparse.embedding_bags.t"
    with pytest.raises(LiveTableError, match=f"'{path}': no rank has the rows 30 to 39: make the same plan .* exclude"):
        live_tables(model, min_rows=1)
    assert len(live_tables(model, min_rows=1, exclude=[path])) == 0


def test_ranks_that_choose_other_tables_are_refused_by_all():
    wire = Wire(2)

    def work(rank):
        model = nn.ModuleDict({"sparse": collection()})
        with pytest.raises(LiveTableError) as refusal:
            find_tables(model, [], alone(ThreadGroup(rank, wire)), min_rows=1 + rank, names={}, exclude=())
        return str(refusal.value)

    one, other = run_all(work, range(2), 2)
    assert one == other
    assert "min_rows=1, names={}, exclude=[] on rank 0, and min_rows=2, names={}, exclude=[] on rank 1: give" in one
