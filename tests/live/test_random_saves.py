"""Whatever trains, saves and fails in between: each checkpoint is the rows of its moment, and a delta misses none."""

import random
from collections import Counter
from contextlib import suppress

import pytest
import torch
from support.devices import here
from support.live_runs import MARKED, OPTIMIZERS, Run, assert_same, read_rows
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt.errors import CheckpointExistsError
from recckpt.inspect.verify import verify


class Marathon:
    """A run that does at random what runs do, with two savers, and knows what each checkpoint has to be."""

    def __init__(self, tmp_path, rule, seed, audit=0, deltas=True):
        self.rule, self.random = rule, random.Random(seed)
        self.run = Run(tmp_path / "one", rule, seed=seed, audit=audit, deltas=deltas, max_keep=None)
        self.savers = [self.run.saver, self.run.new_saver(tmp_path / "two", deltas=deltas, max_keep=None)]
        self.position = Position()
        for saver in self.savers:
            saver.register_io_state("position", self.position)
        self.urls = [tmp_path / "one", tmp_path / "two"]
        self.taken = [None, None]  # an id that stays
        self.bases = [None, None]  # rows of the base
        self.states = [{}, {}]
        self.open = []  # outputs of forwards whose backward is still to come
        self.n_saves = self.n_deltas = self.n_background = self.n_written = self.n_changed = 0

    def go_on(self, n_actions):
        for _ in range(n_actions):
            action = self.random.choice([self.train, self.train, self.forward, self.backward, self.save, self.rare])
            action()
        for number in (0, 1):
            self.check(number)

    def train(self):
        self.run.train(self.random.randint(1, 4), self.random.randint(1, 6))

    def forward(self):
        ids = torch.randint(0, 60, (3, 2), generator=self.run.random)
        self.open.append(self.run.model(ids.to(here())).sum())

    def backward(self):
        if self.open:
            with torch.autograd.set_multithreading_enabled(False):
                self.run.row_optim.zero_grad()
                with suppress(RuntimeError):  # a step since has changed what this backward needs
                    self.open.pop().backward()
            self.run.step()

    def rare(self):
        what = self.random.randint(0, 9)
        if what == 0:
            self.run.model.load_state_dict(self.run.model.state_dict())
        elif what == 1:
            self.run.row_optim.load_state_dict(self.run.row_optim.state_dict())
        elif what == 2:
            self.run.model.users.weight.data = self.run.model.users.weight.detach() + 1
        elif what == 3:
            with torch.no_grad():
                self.run.model.items.weight[3].fill_(self.n_saves)
        elif what == 4:
            self.run.row_optim.param_groups[0]["lr"] *= 0.9

    def save(self):
        number, in_background = self.random.randint(0, 1), self.random.random() < 0.7
        ephemeral, fails = self.random.random() < 0.15, self.random.random() < 0.15
        saver, ckpt_id, rows, state = self.savers[number], f"c{self.n_saves}", self.run.rows(), self.run.state()
        self.n_saves += 1
        begin = saver.save_async if in_background else saver.save
        if fails and self.taken[number]:  # once the state was taken
            handle = saver.save_async(self.taken[number], step=self.n_saves)
            self.train()
            with pytest.raises(CheckpointExistsError):
                handle.wait()
            return
        if fails:  # while the state is taken
            self.position.is_broken = True
            with pytest.raises(ZeroDivisionError):
                begin(ckpt_id, step=self.n_saves, ephemeral=ephemeral)
            self.position.is_broken = False
            return
        save = begin(ckpt_id, step=self.n_saves, ephemeral=ephemeral)
        if in_background:
            self.n_background += 1
            self.train()
            if self.random.random() < 0.3:
                self.forward()
                self.backward()
            save = save.wait()
        self.committed(number, save, rows, state, ephemeral)

    def committed(self, number, record, rows, state, ephemeral):
        base = self.bases[number]
        if record.kind == "delta":
            self.n_deltas += 1
            for table in record.tables:
                changed = sum(rows[table.name][i] != base[table.name][i] for i in base[table.name])
                assert changed <= table.delta.upserts
                if not table.delta.replaced and self.rule in MARKED:
                    self.n_written += table.delta.upserts
                    self.n_changed += changed
        if not ephemeral:
            self.bases[number], self.taken[number] = rows, record.ckpt_id
        self.states[number] = {record.ckpt_id: state}
        self.run.url = self.urls[number]
        assert read_rows(self.run, record.ckpt_id) == rows

    def check(self, number):
        """Restore the newest checkpoint, and compare all there is."""
        if not self.states[number]:
            return
        (ckpt_id, state), self.run.url = next(iter(self.states[number].items())), self.urls[number]
        assert verify(str(self.urls[number]), threads=1) == []
        self.train()
        self.savers[number].load(ckpt_id=ckpt_id)
        assert_same(self.run.state(), state)


class Position:
    """A position in the data, which cannot be taken while it is broken."""

    is_broken = False

    def state_dict(self):
        if self.is_broken:
            raise ZeroDivisionError
        return {}

    def load_state_dict(self, state):
        pass


@mostly_slow()
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_each_checkpoint_of_a_run_at_random_is_that_of_its_moment(tmp_path, rule):
    marathon = Marathon(tmp_path, rule, seed=1)
    marathon.go_on(30)
    assert marathon.n_deltas or marathon.rule not in MARKED


def many(tmp_path, rules, n_models, **options):
    """Run so many models of each rule, and return what they did, which is all right."""
    done = Counter()
    for rule in rules:
        for number in range(max(1, n_models // SWEEP_STRIDE)):
            marathon = Marathon(tmp_path / f"{rule} {number}", rule, seed=number, **options)
            marathon.go_on(60)
            done += Counter(models=1, saves=marathon.n_saves, background=marathon.n_background)
            done += Counter(deltas=marathon.n_deltas, written=marathon.n_written, changed=marathon.n_changed)
    return done


@pytest.mark.slow
def test_hundreds_of_saves_in_the_background_have_no_wrong_row(tmp_path, record_property):
    done = many(tmp_path, OPTIMIZERS, 8)
    record_property("figures", {"live tables, random saves": {**done, "wrong": 0}})
    assert done["background"] >= 500 // SWEEP_STRIDE
    assert done["changed"] <= done["written"] <= 1.1 * done["changed"]


@pytest.mark.slow
def test_an_audit_of_a_hundred_models_finds_no_row_that_was_missed(tmp_path, record_property):
    done = many(tmp_path, MARKED, 12, audit=1)
    record_property("figures", {"live tables, audited": {**done, "missed": 0}})
    assert done["models"] >= 100 // SWEEP_STRIDE
    assert done["deltas"] >= done["models"]
