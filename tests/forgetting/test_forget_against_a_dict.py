"""Whatever was saved, merged and forgotten: each checkpoint holds what a dict says, and no file what was forgotten."""

import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.forgetting import ForgettingRun, files_with, fill, ids_at
from support.spec_reader import read

import recckpt
from recckpt import CheckpointManager
from recckpt.compaction.adopting import adopt
from recckpt.forgetting.forget import forget
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import list_checkpoints

NUMBERS = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("fill"), NUMBERS),
        st.tuples(st.just("erase"), NUMBERS),
        st.tuples(st.just("save"), NUMBERS),
        st.tuples(st.just("save"), NUMBERS),
        st.tuples(st.just("merge"), NUMBERS),
        st.tuples(st.just("forget outside"), NUMBERS),
        st.tuples(st.just("forget inside"), NUMBERS),
    ),
    min_size=4,
    max_size=16,
)


class Pair:
    """A run whose table ``user`` is to be forgotten from, and the dicts that it is held against."""

    def __init__(self, root: Path) -> None:
        self.root, self.rows, self.saved, self.step = root, {}, {}, 0
        self.start()

    def start(self) -> None:
        self.run = ForgettingRun(self.root)
        self.manager = CheckpointManager(self.run.saver, 10**6)
        self.manager.restore()
        self.rows = dict(self.saved.get(f"ckpt_{self.step}", {}))

    def fill(self, numbers) -> None:
        value = float(len(self.rows) + self.step)
        fill(self.run.user, ids_at(*numbers), value)
        self.rows |= {id_: (value, id_ % 97) for id_ in ids_at(*numbers)}

    def erase(self, numbers) -> None:
        self.run.user.erase(torch.tensor(ids_at(*numbers)))
        self.rows = {id_: row for id_, row in self.rows.items() if id_ not in ids_at(*numbers)}

    def save(self, numbers) -> None:
        self.fill(numbers[:2])
        self.step += 1
        self.run.saver.save(f"ckpt_{self.step}", step=self.step)
        self.saved[f"ckpt_{self.step}"] = dict(self.rows)

    def merge(self, numbers) -> None:
        if self.saved:
            recckpt.compact(self.root, f"ckpt_{1 + numbers[0] % self.step}")
            if numbers[-1] % 2:
                adopt(self.root)
                self.start()

    def drop(self, numbers) -> None:
        gone = set(ids_at(*numbers))
        for rows in (self.rows, *self.saved.values()):
            for id_ in gone & rows.keys():
                del rows[id_]
        self.check(gone)

    def forget_outside(self, numbers) -> None:
        if self.saved:
            forget(self.root, "user", ids_at(*numbers))
            self.start()
            self.drop(numbers)

    def forget_inside(self, numbers) -> None:
        self.manager.forget("user", ids_at(*numbers))
        self.drop(numbers)

    def check(self, gone=()) -> None:
        listing = list_checkpoints(self.run.saver.storage)
        assert listing.ckpt_ids == list(self.saved)
        assert not listing.damaged
        for name, rows in self.saved.items():
            found = read(self.root, name, "user")
            assert set(found) == set(rows), name
        assert not self.saved or verify(str(self.root)) == []
        assert files_with(self.root, gone) == {}


def holds(steps) -> None:
    with tempfile.TemporaryDirectory() as directory:
        pair = Pair(Path(directory) / "runs")
        for name, numbers in steps:
            getattr(pair, name.replace(" ", "_"))(numbers)
        if pair.saved:
            pair.check()
            pair.start()
            live = dict(zip(pair.run.user.ids().tolist(), pair.run.user.embeddings().tolist(), strict=True))
            assert {id_: tuple(row) for id_, row in live.items()} == pair.rows


test_runs_that_forget_are_as_a_dict_says = drawn(STEPS, few=4, many=150)(holds)
