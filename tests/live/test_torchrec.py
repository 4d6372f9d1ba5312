"""Collections as only GPUs have them, by stand-ins for TorchRec's: left dense by name, with what to do."""

import pytest
from support.fake_fbgemm import SplitTableBatchedEmbeddingBagsCodegen, SSDTableBatchedEmbeddingBags
from support.fake_torchrec import DMPCollection, ShardedEmbeddingBagCollection
from torch import nn

from recckpt.live import live_tables


def collection(kernel=None, **options):
    return ShardedEmbeddingBagCollection(kernel or SplitTableBatchedEmbeddingBagsCodegen([(40, 2)]), **options)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (collection(stash_weights=True), "its weights are stashed in forward passes (stash_weights=True), which"),
        (
            collection(SSDTableBatchedEmbeddingBags()),
            "its kernel is a SSDTableBatchedEmbeddingBags, expected one",
        ),
        (DMPCollection(collection()), "its replicas differ until DMPCollection.sync(): use DistributedModelParallel"),
    ],
)
def test_what_only_gpus_have_and_cannot_be_saved_by_rows_stays_dense_and_says_why(module, why):
    tables = live_tables(nn.ModuleDict({"sparse": module}), min_rows=1)
    assert len(tables) == 0
    assert f"embedding_bags.t: {why}" in str(tables)
