"""What an edition of the format holds: a small run of each family, and what is in it, known before it is saved.

``write`` makes the files of a family in an empty directory, and notes what each checkpoint has. ``restore`` brings the
newest one back into a fresh run, and returns what that holds: the same as was noted of it.
"""

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from support.builders import OPTIMIZERS, ClickModel, Run, bits, frozen
from support.live_runs import LiveRun
from support.near_runs import NearRun
from support.thread_ranks import on_ranks
from torch import Tensor, nn

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.averages import RowAverage
from recckpt.format.codec import seal
from recckpt.policies import Bloom, Choose, MinCount
from recckpt.rewrite import compact, forget, mirror
from recckpt.sparse import Constant, HashTable, SparseAdam, gen_slice

ALWAYS = Deltas(full_every=100, max_dirty=1.0, max_chain_bytes=1e6)
NEVER = 10**9
Json = dict[str, Any]


def tensor_json(value: Tensor) -> Json:
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "hex": bits(value).hex()}


def table_json(ids: Tensor, slots: Mapping[str, Tensor]) -> Json:
    """Return the rows of a table in the order of their ids."""
    order = torch.argsort(ids)
    return {"ids": ids[order].tolist(), "slots": {name: tensor_json(values[order]) for name, values in slots.items()}}


def rows_json(table: HashTable) -> Json:
    return table_json(table.ids(), {"embedding": table.embeddings(), **table.slots})


def content(model: nn.Module, **objects: Any) -> Json:
    """Return what a model of our tables holds, and a digest of what is registered beside it.

    What an average is made of shows in its embeddings alone: those three slots are not looked at.
    """
    state = model.state_dict()
    return {
        "tables": {value.name: rows_json(value) for value in state.values() if isinstance(value, HashTable)},
        "dense": {name: tensor_json(value) for name, value in state.items() if isinstance(value, Tensor)},
        "objects": {name: xxhash.xxh3_64_hexdigest(repr(frozen(value)).encode()) for name, value in objects.items()},
    }


@dataclass
class Scene:
    """A directory that a family is written to, and what was noted of it."""

    root: Path
    checkpoints: dict[str, Json] = field(default_factory=dict)  # directory, as readers are given it -> content
    restored: Json = field(default_factory=dict)  # what restore() brings back

    @property
    def run(self) -> Path:
        return self.root / "run"

    def note(self, ckpt_id: str, found: Json, run: str = "run") -> None:
        """Note what a checkpoint holds; the last one is what is restored."""
        self.checkpoints[f"{run}/{ckpt_id}"] = {key: found[key] for key in ("tables", "dense")}
        self.restored = found

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"checkpoints": self.checkpoints, "restored": self.restored}, indent=0) + "\n")


@dataclass(frozen=True)
class Family:
    """How a family is written, and how its newest checkpoint comes back; None where that takes more than torch."""

    write: Callable[[Scene], None]
    restore: Callable[[Path], Json] | None


FAMILIES: dict[str, Family] = {}


def family(restore: Callable[[Path], Json] | None) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    def known(write: Callable[[Scene], None]) -> Callable[[Scene], None]:
        FAMILIES[write.__name__] = Family(write, restore)
        return write

    return known


# Runs of two tables, a dense part, an optimizer of each, and a dataset.


def content_of_run(run: Run) -> Json:
    dense, sparse = run.dense.state_dict()["state"], run.sparse.state_dict()["state"]
    generators = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()
    objects = {"dense": dense, "sparse": sparse, "position": run.stream.position, "step": run.manager.global_step}
    return content(run.model, **objects, generators=generators)


def restore_run(root: Path) -> Json:
    run = Run(root / "run", NEVER, seed=1)
    run.manager.restore()
    return content_of_run(run)


@family(restore_run)
def full(scene: Scene) -> None:
    run = Run(scene.run, NEVER).train(5)
    run.manager.save()
    scene.note("ckpt_5", content_of_run(run))


@family(restore_run)
def chain(scene: Scene) -> None:
    """Deltas, with rows that left and came again."""
    run = Run(scene.run, NEVER, max_keep=None, deltas=ALWAYS)
    for step in (5, 10, 15, 20):
        run.train(5)
        run.manager.save()
        scene.note(f"ckpt_{step}", content_of_run(run))


@family(restore_run)
def compacted(scene: Scene) -> None:
    """A delta that was made whole and adopted, one that stands on it, and an offer to make that whole too."""
    run = Run(scene.run, NEVER, max_keep=2, deltas=ALWAYS)
    for step in (5, 10):
        run.train(5)
        run.manager.save()
        scene.note(f"ckpt_{step}", content_of_run(run))
    run.saver.close()
    compact(scene.run, adopt=True)
    run = Run(scene.run, NEVER, max_keep=2, deltas=ALWAYS)
    run.manager.restore()
    run.train(5)
    run.manager.save()
    scene.note("ckpt_15", content_of_run(run))
    compact(scene.run)


@family(restore_run)
def forgotten(scene: Scene) -> None:
    """A chain of which ids were taken out, with the deltas on it that were saved before and since."""
    run = Run(scene.run, NEVER, max_keep=2, deltas=ALWAYS)
    for _ in range(2):
        run.train(5)
        run.manager.save()
    gone = run.model.items.ids().sort().values[::3]
    run.saver.close()
    forget(scene.run, "item", gone.tolist())
    run.model.items.erase(gone)
    scene.note("ckpt_10", content_of_run(run))


@family(None)  # nobody saves in a mirror
def mirrored(scene: Scene) -> None:
    """A mirror, which stands in the place of its run."""
    chain(Scene(scene.root.parent / "source"))
    source = scene.root.parent / "source/run"
    mirror(source, scene.run, keep=2)
    run = Run(source, NEVER, seed=1)
    run.manager.restore()
    scene.note("ckpt_20", content_of_run(run))


def content_of_live(run: LiveRun) -> Json:
    """Return what a run of plain embeddings holds; the number of a row is its id."""
    found = content(run.model, dense=run.dense.state_dict()["state"], position=run.stream.position)
    for table, name in (("users", "user/1"), ("items", "item")):
        weight = run.model.get_submodule(table).weight
        found["dense"].pop(f"{table}.weight")
        sums = run.sparse.state[weight]["sum"]
        slots = {"embedding": weight.detach(), "sparse_adagrad_sum": sums}
        found["tables"][name] = table_json(torch.arange(len(weight)), slots)
    return found


def restore_live(root: Path) -> Json:
    run = LiveRun(root / "run", NEVER, seed=1)
    run.manager.restore()
    return content_of_live(run)


@family(restore_live)
def live_rows(scene: Scene) -> None:
    """Plain embeddings, saved where they lie, and a delta of them."""
    run = LiveRun(scene.run, NEVER, max_keep=None, deltas=ALWAYS)
    for step in (5, 10):
        run.train(5)
        run.manager.save()
        scene.note(f"ckpt_{step}", content_of_live(run))


# Tables alone.


def modules(*tables: HashTable) -> nn.ModuleDict:
    return nn.ModuleDict({f"t{number}": table for number, table in enumerate(tables)})


def drawn(n_rows: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.rand((n_rows, *shape), generator=torch.Generator().manual_seed(seed))


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8]
DTYPES += [torch.int16, torch.int32, torch.int64]


def dtype_tables() -> nn.ModuleDict:
    slots = HashTable(1, name="slots")
    for number, dtype in enumerate(DTYPES):
        slots.add_slot(f"s_{number}", (2,) if number % 2 else (), dtype)
    return modules(*(HashTable((2, 3), name=str(dtype)[6:], dtype=dtype) for dtype in DTYPES[:4]), slots)


def restored(model: nn.Module, root: Path) -> Json:
    Saver(model, output_dir=str(root / "run")).load()
    return content(model)


@family(lambda root: restored(dtype_tables(), root))
def dtypes(scene: Scene) -> None:
    """Embeddings of each dtype that one may have, and slots of each; the least and the greatest id."""
    model = dtype_tables()
    ids = torch.tensor([-(2**63), -1, 0, 1, 2**63 - 1])
    for table in model.values():
        table.insert(ids, (drawn(5, *table.embedding_shape) * 100 - 50).to(table.dtype))
    for number, dtype in enumerate(DTYPES):
        model["t4"].set_slot(
            f"s_{number}", ids, (drawn(5, *model["t4"].slots[f"s_{number}"].shape[1:], seed=number) * 100).to(dtype)
        )
    Saver(model, output_dir=str(scene.run)).save("ckpt_1")
    scene.note("ckpt_1", content(model))


@family(lambda root: restored(modules(HashTable(3, name="nobody"), HashTable(1, name="one")), root))
def empty(scene: Scene) -> None:
    """A table without rows beside one with a row."""
    model = modules(HashTable(3, name="nobody"), HashTable(1, name="one"))
    model["t1"].insert(torch.tensor([7]), torch.tensor([[0.5]]))
    Saver(model, output_dir=str(scene.run)).save("ckpt_1")
    scene.note("ckpt_1", content(model))


NAMES = ["a/b", "a b", "..", ".hidden", "ünïcode", "表", "😀", "x" * 200, "%41", "a\\b", "a'b\"c", "tab\there", "CON"]


def named() -> nn.ModuleDict:
    model = modules(*(HashTable(1, name=name) for name in NAMES))
    for number, name in enumerate(NAMES):
        model.register_buffer(f"buffer {name}".replace(".", "_"), torch.full((2,), number))
    return model


@family(lambda root: restored(named(), root))
def names(scene: Scene) -> None:
    """Names of tables, tensors and checkpoints that file systems or JSON might not like."""
    model = named()
    for number in range(len(NAMES)):
        model[f"t{number}"].insert(torch.arange(number + 1), drawn(number + 1, 1))
    Saver(model, output_dir=str(scene.run)).save("a/b %41 表 😀")
    scene.note(next(path.parent.name for path in scene.run.glob("*/manifest.json")), content(model))


CHOOSE = Choose(
    slots=["!*@sparse_adam_exp_avg"], where={"t": {"count": {"min": 2}}}, store={"*@sparse_adam_exp_avg_sq": "bfloat16"}
)


@family(None)  # by design it is less than the run had
def reduced(scene: Scene) -> None:
    """Without one slot, another narrowed, and the rows of ids that were seen twice."""
    table = HashTable(2, name="t", track=("count",), initializer=Constant(0.5))
    optimizer = SparseAdam([table], lr=0.1)
    with Saver(modules(table), optimizer, str(scene.run), deltas=ALWAYS, max_keep=None, choose=CHOOSE) as saver:
        for step, ids in enumerate(([*range(20), *range(10)], [*range(15, 30)]), 1):
            table(torch.tensor(ids)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            saver.save(f"ckpt_{step}", step=step)
            slots = {"embedding": table.embeddings(), **table.slots}
            del slots["sparse_adam_exp_avg"]
            slots["sparse_adam_exp_avg_sq"] = slots["sparse_adam_exp_avg_sq"].bfloat16()
            kept = slots["count"] >= 2
            rows = table_json(table.ids()[kept], {name: values[kept] for name, values in slots.items()})
            scene.note(f"ckpt_{step}", {"tables": {"t": rows}, "dense": {}, "objects": {}})


class Counted:
    """Tables that count, date, admit and average their rows."""

    def __init__(self, run: Path) -> None:
        track = ("count", "step", "time")
        self.few = HashTable(2, name="few", track=track, admit=MinCount(2), initializer=Constant(0.5))
        self.many = HashTable(2, name="many", admit=MinCount(2, bloom=Bloom(300, 0.1)), initializer=Constant(0.5))
        self.model = modules(self.few, self.many)
        self.average = RowAverage(self.model, 0.9)
        self.model["average"] = nn.ModuleList(self.average.tables.values())
        self.optimizer = SparseAdam([self.few, self.many], lr=0.1)
        self.saver = Saver(self.model, self.optimizer, str(run))
        self.manager = CheckpointManager(self.saver, NEVER)

    def train(self, *ids: int) -> None:
        for table in (self.few, self.many):
            table.event_time = 1.7e9 + ids[0]
            table(torch.tensor(ids)).pow(2).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update()
        self.manager.step()

    def content(self) -> Json:
        return content(self.model)


def restore_counted(root: Path) -> Json:
    run = Counted(root / "run")
    run.manager.restore()
    return run.content()


@family(restore_counted)
def counted(scene: Scene) -> None:
    """Look-ups, candidates, a Bloom filter, and averages."""
    run = Counted(scene.run)
    for begin in range(4):
        run.train(*range(begin, begin + 12), *range(begin, begin + 6))
    run.manager.save()
    scene.note("ckpt_4", run.content())


# Ranks, hosts, objects.


def restore_ranks(root: Path) -> Json:
    model = ClickModel()
    Saver(model, OPTIMIZERS["adam"](model.tables), str(root / "run")).load()
    return content(model)


@family(restore_ranks)
def three_ranks(scene: Scene) -> None:
    """Each rank has a third of the rows; the rest is the same on all."""

    def work(rank: int, connect: Callable[[Saver], Saver]) -> ClickModel:
        model = ClickModel(slice=gen_slice(rank, 3))
        model.load_state_dict({name: value for name, value in state.items() if isinstance(value, Tensor)}, strict=False)
        saver = connect(Saver(model, OPTIMIZERS["adam"](model.tables), str(scene.run)))
        for table in model.tables:
            own = gen_slice(rank, 3).owns(ids)
            table.insert(ids[own], values[own])
        saver.save("ckpt_1", rank, 3, step=1)
        return model

    torch.manual_seed(0)
    state = ClickModel().state_dict()
    ids, values = torch.arange(-30, 30), drawn(60, 4)
    models = on_ranks(3, work)
    found = content(models[0])
    for at, name in enumerate(("user/1", "item")):
        tables = [model.tables[at] for model in models]
        slots = {slot: torch.cat([table.slots[slot] for table in tables]) for slot in tables[0].slots}
        slots["embedding"] = torch.cat([table.embeddings() for table in tables])
        found["tables"][name] = table_json(torch.cat([table.ids() for table in tables]), slots)
    scene.note("ckpt_1", found)


def restore_near(root: Path) -> Json:
    for path in (root / "near").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)  # as they were made: version control keeps no such thing
    (root / "near").chmod(0o700)
    place = xxhash.xxh3_64_hexdigest(os.path.realpath(root / "runs").encode())  # of the output dir, which has moved
    (of_run,) = (root / "near/recckpt-near").iterdir()
    of_run = of_run.rename(of_run.parent / place)
    for path in of_run.rglob("near.json"):
        values = json.loads(path.read_bytes())
        del values["near_xxh3"]
        path.write_bytes(seal({**values, "place": place}, "near_xxh3"))
    run = NearRun(root, dense=nn.Linear(2, 2))
    run.manager.restore()
    return content(run.saver.model)


@family(restore_near)
def near(scene: Scene) -> None:
    """A checkpoint, and near saves since, of which the last is what is restored."""
    torch.manual_seed(0)
    run = NearRun(scene.root, dense=nn.Linear(2, 2))
    run.put(_1=1.0, _2=2.0, _3=3.0).step()
    run.save()
    scene.note("ckpt_1", content(run.saver.model), run="runs")
    run.put(_2=5.0, _4=4.0).step()
    run.erase(1)
    with torch.no_grad():
        run.saver.model["dense"].weight.mul_(2)
    run.step()
    run.saver.close()
    scene.restored = content(run.saver.model)  # of the near save, which readers of checkpoints do not see


class Position:
    """A dataset with a state of its own."""

    def __init__(self) -> None:
        self.state: Json = {}

    def state_dict(self) -> Json:
        return self.state

    def load_state_dict(self, state: Json) -> None:
        self.state = copy.deepcopy(state)


class Objects:
    """A dense model and one registered object of each kind."""

    def __init__(self, run: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.model.register_buffer("narrow", drawn(4, seed=seed).bfloat16())
        self.model.register_buffer("no_rows", torch.zeros(0, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
        self.position, self.counter = Position(), Counter()
        self.plain: Json = {}
        self.tensor, self.array = torch.zeros(3), np.zeros(2, np.int16)
        self.saver = Saver(self.model, output_dir=str(run))
        for name in ("optimizer", "scheduler", "average", "counter", "plain", "tensor", "array"):
            self.saver.register_for_checkpointing(name, getattr(self, name))
        self.saver.register_for_checkpointing("of rank", own := Position(), per_rank=True)
        self.own = own
        self.saver.register_io_state("position", self.position)
        self.manager = CheckpointManager(self.saver, NEVER)

    def train(self) -> None:
        for step in range(3):
            self.model(drawn(4, 2, seed=step)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.manager.step()
        self.counter.update("abca")
        self.plain |= {"text": "ü", "list": [1, 2.5, None, True, (1,)], "bytes": b"\0", 3: {"deep": torch.ones(2)}}
        self.tensor += 0.25
        self.array += 3
        self.own.state = {"a": 1, "drawn": drawn(2)}
        self.position.state = {"epoch": 2, "seen": [1, 2]}

    def content(self) -> Json:
        return content(
            self.model,
            optimizer=self.optimizer.state_dict()["state"],
            scheduler=(self.scheduler.last_epoch, self.scheduler.get_last_lr()),
            average=self.average.state_dict(),
            position=self.position.state,
            own=self.own.state,
            counter=sorted(self.counter.items()),
            plain=self.plain,
            tensor=self.tensor,
            array=self.array.tobytes(),
            step=self.manager.global_step,
        )


def restore_objects(root: Path) -> Json:
    run = Objects(root / "run", 1)
    run.manager.restore()
    return run.content()


@family(restore_objects)
def objects(scene: Scene) -> None:
    """What is registered beside a model, of each kind."""
    run = Objects(scene.run, 0)
    run.train()
    run.manager.save()
    scene.note("ckpt_3", run.content())
