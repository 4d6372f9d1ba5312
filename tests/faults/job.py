"""The run that is saved while faults happen: its whole state follows from its step and its branch."""

import json
import re
from typing import NamedTuple

import torch
from support.builders import bits, frozen, table_state
from torch import nn, optim

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.live import live_tables
from recckpt.output_dir.claims import claimed_epochs
from recckpt.output_dir.listing import attempt_dirs, list_checkpoints
from recckpt.output_dir.offers import offers_in, why_not
from recckpt.sparse import HashTable, SparseAdagrad

MOST_STEPS = 8
ROWS, DIM = 50, 4
FULL_EVERY = 2  # deltas, of a job that saves them


class State(NamedTuple):
    """What a run is like after a step; runs that went back to an earlier step are on another branch."""

    step: int
    branch: int = 0


NOTHING = State(0)  # where nothing restores


class LiveModel:
    """Plain embeddings and the optimizers of torch that train them; any two of the same history are alike."""

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.model = nn.ModuleDict({"user": nn.Embedding(ROWS, DIM, sparse=True), "item": nn.EmbeddingBag(ROWS, DIM)})
        self.model.register_buffer("history", torch.zeros(MOST_STEPS, dtype=torch.int64))  # branch + 1 of each step
        user, item = (self.model[name].weight for name in ("user", "item"))
        with torch.no_grad():
            for weight in (user, item):
                weight.copy_(torch.randn(ROWS, DIM, generator=draw))
        self.optimizers = optim.SparseAdam([user], lr=0.1), optim.Adagrad([item], lr=0.1)

    def train(self, step, branch):
        """Step, and write a row of ``item`` of which no hook knows."""
        self.model.history[step - 1] = branch + 1
        ids = torch.randint(ROWS, (5, 2), generator=torch.Generator().manual_seed(100 * branch + step))
        (self.model["user"](ids[:, 0]) + self.model["item"](ids)).square().sum().backward()
        for one in self.optimizers:
            one.step()
            one.zero_grad()
        self.model["item"].weight.data[step] += 1

    def state(self):
        """Return all that there is, as data that compares bit for bit."""
        return [frozen(part.state_dict()) for part in (self.model, *self.optimizers)]

    @property
    def history(self):
        """The branch of each step until now."""
        return [branch - 1 for branch in self.model.history.tolist() if branch]


class LiveContent(LiveModel):
    """The same as live tables: one whose hooks say which rows change, and one whose fingerprints do."""

    sparse_optim = None

    def __init__(self):
        super().__init__()
        self.live_tables = live_tables(self.model, self.optimizers, min_rows=1, marks={"item": "fingerprints"})

    def become(self, state):
        """Train the step after that of now."""
        assert len(self.history) == state.step - 1
        self.train(*state)

    def is_of(self, state):
        """Say whether every bit is that of a state: of what a run of that history comes to that nobody saved."""
        history = self.history
        if len(history) != state.step or history[-1:] != [state.branch][: state.step]:
            return False
        again = LiveModel()
        live_tables(again.model, again.optimizers, min_rows=1).close()  # which makes the states of the optimizers
        for step, branch in enumerate(history, 1):
            again.train(step, branch)
        return self.state() == again.state()


class Job:
    """A process of the run. With one thread, which is what it has unless told otherwise, its calls repeat exactly."""

    def __init__(self, url, max_keep=1, *, threads=1, rows=ROWS, deltas=False, live=False):
        self.content = LiveContent() if live else TableContent(rows, deltas=deltas)
        self.saver = Saver(
            self.content.model,
            self.content.sparse_optim,
            str(url),
            max_keep=max_keep,
            concurrency=threads,
            deltas=Deltas(full_every=FULL_EVERY, max_chain_bytes=99.0) if deltas else False,
            tables=self.content.live_tables,
        )
        self.manager = CheckpointManager(self.saver, 10**9)

    @classmethod
    def resumed(cls, url, restore, max_keep=1, **options):
        """Begin a process that has restored the ``newest`` checkpoint, ``nothing`` or that of a step."""
        job = cls(url, max_keep, **options)
        if restore != "nothing":
            job.manager.restore(None if restore == "newest" else restore)
        return job

    def advance(self, branch=0):
        """Train a step."""
        self.manager.step()
        self.set_state(self.manager.global_step, branch)

    def set_state(self, step, branch=0):
        self.content.become(State(step, branch))

    def save(self, *, background=False):
        """Save, and return once that is acknowledged."""
        if not background:
            self.manager.save()
            return
        step = self.manager.global_step
        self.saver.save_async(f"ckpt_{step}", step=step, overwrite=True).wait()

    def holds(self, state):
        """Say whether every bit, and the step, is that of a state."""
        return self.manager.global_step == state.step and self.content.is_of(state)

    def is_of_step(self, step, branch=0):
        """Say whether every bit is that of a step."""
        return self.content.is_of(State(step, branch))


class TableContent:
    """A table of ours, and a dense layer, of which all follows from the state."""

    live_tables = None

    def __init__(self, rows, *, deltas):
        self.rows, self.contents = rows, changing_contents if deltas else contents
        self.table = HashTable(DIM, name="t")
        self.top = nn.Linear(DIM, 1)
        self.model = nn.ModuleDict({"t": self.table, "top": self.top})
        self.sparse_optim = SparseAdagrad([self.table])

    def become(self, state):
        """Take over the rows and the weights of a state."""
        ids, values, slots = self.contents(state, self.rows)
        if self.contents is contents:
            self.table.clear()
            self.table.insert(ids, values, slots)
        else:
            self._change_to(ids, values, slots)
        with torch.no_grad():
            self.top.weight.fill_(float(values[0, 0]))
            self.top.bias.fill_(-float(values[0, 0]))

    def _change_to(self, ids, values, slots):
        """Change those rows that differ, which are few."""
        found, is_there = self.table.lookup(ids)
        differs = ~is_there | (found != values).any(1)
        self.table.erase(self.table.ids()[~torch.isin(self.table.ids(), ids)])
        self.table.insert(ids[differs], values[differs], {name: slot[differs] for name, slot in slots.items()})

    def is_of(self, state):
        """Say whether every bit is that of a state."""
        if state == NOTHING:
            return len(self.table) == 0
        ids, values, slots = self.contents(state, self.rows)
        rows = {"id": bits(ids), "embedding": bits(values), **{name: bits(slot) for name, slot in slots.items()}}
        dense = torch.full((DIM,), float(values[0, 0])), torch.full((1,), -float(values[0, 0]))
        return table_state(self.table) == rows and [bits(self.top.weight), bits(self.top.bias)] == [*map(bits, dense)]


def contents(state, rows):
    """Return the ids, the embeddings and the slots of a state."""
    values = torch.full((rows, DIM), state.step + state.branch / 2)
    return torch.arange(state.step, state.step + rows), values, {"sparse_adagrad_sum": values + 1}


def changing_contents(state, rows):
    """Return those of a state of which a step changes a fifth of the rows, adds one and deletes one.

    The first row tells the branch.
    """
    ids = torch.arange(state.step, state.step + rows)
    changed = state.step - (state.step - ids) % 5  # the last step at which it was its turn
    changed = torch.maximum(changed, torch.clamp(ids - rows + 1, min=1)).to(torch.float32)  # or it was added
    values = changed[:, None].expand(-1, DIM).clone()
    values[0] = state.step + state.branch / 2
    return ids, values, {"sparse_adagrad_sum": values + 1}


def restored(url, candidates, **options):
    """Restore the newest checkpoint, and return the job and which of the candidates it is; fail if it is none."""
    job = Job(url, **options)
    step = job.manager.restore()
    found = [state for state in candidates if job.holds(state)]
    assert found, f"restored step {step}, which is none of {sorted(candidates)}, or not whole"
    check_index(job.saver.storage, found[0])
    return job, found[0]


def check_index(storage, newest):
    """Check that the index file is whole, if there is one, and its newest is not newer than what restores."""
    try:
        index = storage.read("checkpoint", 1 << 20).decode()
    except FileNotFoundError:
        return
    assert re.fullmatch(r"(ckpt_\d+\n)+", index), f"the index file is torn: {index!r}"
    steps = [int(step) for step in re.findall(r"\d+", index)]
    assert steps[-1] <= newest.step, f"the index file names steps {steps}, and {newest.step} is what restores"


def check_tidy(storage, is_kept, newest):
    """Check that those checkpoints are there which shall be kept, by their number or a rule, and no dead attempts."""
    listing = list_checkpoints(storage)
    assert not listing.damaged, f"damaged: {listing.damaged}"
    assert not listing.fenced, f"fenced: {listing.fenced}"
    if isinstance(is_kept, int):
        assert len(listing.committed) == is_kept
    else:
        assert [c.directory for c in listing.committed if not is_kept(c)] == [], "kept for nothing"
    assert storage.read("checkpoint", 1 << 20).decode() == "".join(f"{c.ckpt_id}\n" for c in listing.current)
    timeline = [json.loads(line) for line in storage.read("timeline.jsonl", 1 << 20).splitlines()]
    assert timeline[-1]["step"] == newest.step
    offers, epoch = offers_in(storage, listing), max(claimed_epochs(storage))
    assert [found.directory for found in offers if why_not(found, epoch, listing) is None] == [], "offers wait"
    known = {found.directory for found in (*listing.committed, *offers)}
    for directory in set(attempt_dirs(storage)) - known:
        files = storage.list_files(directory)  # a death beside INTENT leaves a directory that nobody can be told to own
        assert all(name.startswith("INTENT.") for name in files), f"{directory} is left with {files}"
