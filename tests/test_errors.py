import copy
import pickle

import pytest

from recckpt import errors
from recckpt.errors import (
    CheckpointExistsError,
    CheckpointInUseError,
    CheckpointNotFoundError,
    CheckpointRemovedError,
    CommitNotDurableError,
    ConversionError,
    CorruptCheckpointError,
    ForkedError,
    FormatVersionError,
    LiveTableError,
    LoadConfError,
    LookupFailedError,
    MissedRowsError,
    MissingLibraryError,
    PartlyLoadedError,
    RankLostError,
    RecckptError,
    SaveFailedError,
    StateMismatchError,
    WriterFencedError,
)

EXAMPLES = [
    RecckptError("text"),
    CheckpointNotFoundError("no ckpt_1"),
    CheckpointExistsError("ckpt_1"),
    CorruptCheckpointError("ckpt_1/model.pt", "its size", found=3, expected="4 bytes", remedy="mend it"),
    FormatVersionError("ckpt_1/manifest.json", found=99, supported=1),
    StateMismatchError("model.pt", missing=["a"], unexpected=["b"], mismatched={"c": ("int8", "int64")}, remedy="so"),
    LoadConfError("load_conf: unknown key 'lod'"),
    LiveTableError("table 't': found 2 ids without a row"),
    MissedRowsError("t", 2, [3, 7]),
    WriterFencedError("epoch 3"),
    ForkedError("this Saver", 3),
    LookupFailedError("looking up 't'", 1, "ValueError: ids must be int64", "mend it"),
    SaveFailedError("ckpt_1", 3, "OSError: disk full"),
    CommitNotDurableError("ckpt_1", 0, "OSError: disk on fire", is_in_place=False),
    RankLostError([1, 2], "it did not answer within 5 s"),
    CheckpointRemovedError("runs/ckpt_1", emptied=["item"]),
    PartlyLoadedError("OSError: reset", emptied=["item"], mixed=["user"]),
    ConversionError("a.safetensors", "tensor 'x'", found="3 bytes", expected="4", remedy="copy it again"),
    MissingLibraryError("this needs duckdb, which is not installed: pip install 'recckpt[sql]'"),
    CheckpointInUseError("runs: 'ckpt_1' is not deleted: it is pinned"),
]


def test_every_error_has_an_example_here():
    defined = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, RecckptError)}
    assert defined == {type(error) for error in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_errors_cross_ranks(error, protocol):
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.args == error.args
        assert twin.__dict__ == error.__dict__


def test_a_note_crosses_too():
    error = SaveFailedError("ckpt_1", 0, "x")
    error.add_note("on host a")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["on host a"]


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (CheckpointNotFoundError, FileNotFoundError),
        (CheckpointExistsError, FileExistsError),
        (StateMismatchError, ValueError),
        (LoadConfError, ValueError),
    ],
)
def test_errors_are_caught_as_the_builtin_that_people_know(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, RecckptError)


def test_a_message_says_what_where_found_expected_and_remedy():
    text = str(EXAMPLES[3])
    for part in ("ckpt_1/model.pt", "its size", "found 3", "expected 4 bytes", "mend it"):
        assert part in text


def test_a_mismatch_names_everything_at_once():
    text = str(EXAMPLES[5])
    for part in ("missing in the checkpoint: 'a'", "not in the model: 'b'", "'c': found int8, expected int64", "so"):
        assert part in text
