"""Live tables of which each state is what its steps have led to, and says which those were."""

import torch
from support.builders import frozen
from torch import nn, optim

from recckpt.live import live_tables

ROWS, DIM, MOST_STEPS = 50, 4, 8


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
