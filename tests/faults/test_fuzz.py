"""T7: damaged bytes in every file of full checkpoints and of deltas are refused, never followed."""

import io
import json
import math
import os
import random
import shutil
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from faults.test_flips import ALWAYS
from support.builders import Run, state_of
from support.forge import Forge, filled, save_tables, sealed
from support.forked import outcomes
from support.live_runs import LiveRun
from support.mutations import mutated, mutated_json, places
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt import CheckpointReader
from recckpt.cli import main
from recckpt.convert import export_checkpoint
from recckpt.errors import RecckptError
from recckpt.inspect.verify import verify
from recckpt.sparse.files.arrow_format import column_buffer
from recckpt.storage import open_storage

LONG = 10 / SWEEP_STRIDE  # times as many cases as KINDS says, for each of four seeds
SHORT = 0.2
DAMAGE = "damage"  # must be seen, and what is read is what was written
SEALED = "sealed"  # all checksums of files hold: what is read of tables and tensors is what was written, or nothing
FORGED = "forged"  # well-formed, it may be: errors of ours or other values, and nothing else
SHORT_OF_DELTAS = 0.1
CHAINS = {  # a chain of two links, one of five, and one of live tables
    "deltas, max_keep 1": (Run, 5, 1),
    "deltas, max_keep 2": (Run, 2, 2),
    "live tables, max_keep 2": (LiveRun, 2, 2),
}
IN_BRIEF, *IN_FULL = CHAINS


class Target:
    """An output dir with one checkpoint, what it holds, and all that reads it."""

    def __init__(self, root):
        self.root = root
        self.forge = Forge(root / "ckpt_10")
        self.parts = self.forge.parts
        self.catalogs = [shard["catalog"] for shard in self.forge.manifest["shards"]]
        self.whole = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        self.content = contents(self.forge.directory)
        ids, vectors = np.frombuffer(self.content["item", "id"], np.int64), self.content["item", "embedding"]
        self.rows = dict(
            zip(ids.tolist(), map(bytes, np.frombuffer(vectors, np.uint8).reshape(len(ids), -1)), strict=True)
        )
        self.live = None

    def path(self, name):
        return self.forge.path(name)

    def data(self, name):
        return self.whole[self.path(name)]

    def values(self, name):
        """Return the JSON in a file, without its seal."""
        values = json.loads(self.data(name))
        values.pop("manifest_xxh3", None)
        return values

    def put(self, files):
        """Put files in the place of others, under new inodes: the old ones may be mapped."""
        for path, data in {**self.whole, **files}.items():
            if not path.exists() or path.read_bytes() != data:
                path.unlink(missing_ok=True)
                path.write_bytes(data)

    def resealed(self, name, data):
        """Return the files that make ``data`` what manifest and catalog say of a file."""
        manifest, files = self.values("manifest.json"), {self.path(name): data}
        for catalog in self.catalogs:
            values = self.values(catalog)
            for part in values["parts"]:
                if part["file"] == name:
                    part["bytes"] = len(data)
                    files[self.path(catalog)] = json.dumps(values).encode()
        for entry in manifest["files"]:
            changed = files.get(self.path(entry["name"]))
            if changed is not None:
                entry["bytes"] = len(changed)
                entry |= {"xxh3": f"{xxhash.xxh3_64_intdigest(changed):016x}"} if "xxh3" in entry else {}
        return {**files, self.path("manifest.json"): sealed(json.dumps(manifest).encode())}

    # What a reader may make of damaged files: one word. An error of ours is "refused".

    def read(self, faults):
        found = contents(self.forge.directory)
        wrong = [name for name, value in found.items() if self.content.get(name, value) != value]
        missing = faults == DAMAGE and found.keys() != self.content.keys()
        return f"WRONG {wrong}" if missing or (wrong and faults != FORGED) else "equal"

    def verify(self, faults):
        return "UNSEEN" if not verify(str(self.root)) and faults == DAMAGE else "seen"

    def restore(self, faults):
        """Let a run restore that has state to lose; the random generators are of the process."""
        if self.live is None:
            return "equal"
        if self.live.made_by != os.getpid():
            self.live.renew()
        self.live.rewind()
        before = state_of(self.live.run)
        try:
            self.live.run.manager.restore(10)
        except RecckptError as error:
            is_torn = self.live.run.lies_in_place and getattr(error, "model_is_torn", False)
            if is_torn:
                self.live.renew()
            return "refused" if is_torn or state_of(self.live.run) == before else "CHANGED"
        same = state_of(self.live.run) == self.live.after
        self.live.renew()
        return "equal" if same or faults != DAMAGE else "WRONG"

    def export(self, faults):
        """Export what is whole: each row is one that was written."""
        out = self.root.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        export_checkpoint(self.forge.directory, out, to="npy", tables=["item"], skip_damaged=True)
        ids, vectors = np.load(out / "item/id.npy").tolist(), np.load(out / "item/embedding.npy")
        found = list(zip(ids, map(bytes, vectors), strict=True))
        is_wrong = len(dict(found)) < len(found) or any(self.rows.get(each) != row for each, row in found)
        return "WRONG rows" if is_wrong and faults != FORGED else "equal"

    def command(self, _):
        for args in (("ls",), ("show",), ("head", "item"), ("repair", "--clean", "--dry-run")):
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                code = main([args[0], str(self.root), *args[1:]])
            assert code in (0, 1), args
        return "equal"

    def attempt(self, number, files, faults):
        """Read a damaged checkpoint, and return one word for each way of reading; the slow ones take turns."""
        self.put(files)
        ways = [self.read, self.verify, self.export, *[[self.restore], [self.restore], [self.command], []][number % 4]]
        if all(self.whole[path] == data for path, data in files.items()):
            return "refused"  # no fault at all
        words = []
        try:
            for reading in ways:
                try:
                    words.append(reading(faults))
                except RecckptError:
                    words.append("refused")
        finally:
            self.put({})
        return " ".join(words)


class Live:
    """A run that restores, again and again."""

    def __init__(self, root, run=Run):
        self.begin = partial(run, root, interval=1000, seed=5)
        self.renew()
        self.generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self.run.manager.restore(10)
        self.after = state_of(self.run)
        self.renew()

    def renew(self):
        self.run, self.made_by = self.begin().train(3), os.getpid()

    def rewind(self):
        torch.set_rng_state(self.generators[0])
        np.random.set_state(self.generators[1])
        random.setstate(self.generators[2])


def contents(directory):
    """Return all that a reader gives out, as bytes by name."""
    found = {}
    with CheckpointReader(str(directory)) as reader:
        for name in reader.tables():
            columns = {}
            for batch in reader.table(name):
                for field, column in zip(batch.schema, batch.columns, strict=True):
                    columns.setdefault(field.name, []).append(column_buffer(column).to_pybytes())
            found |= {(name, column): b"".join(values) for column, values in columns.items()}
        found |= {("", name): np.asarray(reader.read_tensor(name)).tobytes() for name in reader.tensor_names()}
    return found


@pytest.fixture(scope="module")
def run_target(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz") / "runs"
    Run(root, interval=10).train(10)
    target = Target(root)
    target.live = Live(root)
    return target


@pytest.fixture(scope="module")
def tables_target(tmp_path_factory):
    """Tables of several types in two shards and many batches, and nothing else."""
    storage = open_storage(str(tmp_path_factory.mktemp("fuzz") / "runs"))
    storage.prepare()
    slots = {"sparse_m": (3,), "sparse_step": ()}
    shards = [
        [
            filled("item", range(first, 300, 2), slots=slots),
            filled("user", range(first, 50, 2), slots=slots),
            filled("half", range(first, 40, 2), dtype=torch.bfloat16, shape=(2, 2)),
        ]
        for first in range(2)
    ]
    save_tables(storage, *shards, ckpt_id="ckpt_10", concurrency=1, batch_bytes=700)
    return Target(Path(storage.url))


def fuzz(figures, target, cases, faults, harness="bad inputs"):
    """Try the files of each case: nothing but refusals and what was written may come of them."""
    found = outcomes(lambda case: target.attempt(*case, faults), list(enumerate(cases)))
    target.put({})
    assert len(found) == len(cases)
    bad = {n: text for n, text in enumerate(found) if not set(text.split()) <= {"refused", "equal", "seen"}}
    assert not bad, f"{len(bad)} of {len(cases)}: {dict(list(bad.items())[:5])}"
    refused = sum("refused" in text for text in found)
    figures.add(harness, tried=len(cases), refused=refused, wrong=0)
    # of few cases, by chance, a good deal less than the usual four in five
    assert refused >= len(cases) / 4, f"only {refused} of {len(cases)} were refused: these are no faults"


def with_pickle(data, rng):
    """Change the pickle in a file of torch.save, and the checksum that its zip has of it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, mutated(content, rng) if entry.filename.endswith("data.pkl") else content)
    return out.getvalue()


def raw(target, name, rng):
    return {target.path(name): mutated(target.data(name), rng)}


def sizes_resealed(target, name, rng):
    return target.resealed(name, mutated(target.data(name), rng))


def manifest(target, name, rng):
    return {target.path(name): sealed(mutated_json(target.values(name), rng))}


def catalog(target, name, rng):
    return target.resealed(name, mutated_json(target.values(name), rng))


def beside(target, name, rng):
    return {target.root / name: mutated(target.whole[target.root / name], rng)}


def owner(target, name, rng):
    values = json.loads(target.whole[target.root / name])
    del values["owner_xxh3"]
    return {target.root / name: sealed(mutated_json(values, rng)).replace(b"manifest_xxh3", b"owner_xxh3")}


def pickled(target, name, rng):
    return target.resealed(name, with_pickle(target.data(name), rng))


CATALOG, PART = "sparse/00000-of-00001.json", "sparse/00000-of-00001.g0.00.arrow"
INDEX = "dense/00000-of-00001.json"
PICKLED = ["model.pt", "extra.pt", "io_state_0.pt", "rng_0.pt"]
CLAIM, LIST = ".recckpt/owner/1.json", ".recckpt/owner/1.list.json"
KINDS = [  # how, what, number of cases
    *((raw, name, 8) for name in ("manifest.json", CATALOG, INDEX, PART, *PICKLED)),
    *((beside, name, 4) for name in ("checkpoint", CLAIM, LIST)),
    *((owner, name, 6) for name in (CLAIM, LIST)),
    (manifest, "manifest.json", 40),
    (catalog, CATALOG, 30),
    (catalog, INDEX, 30),
    (sizes_resealed, PART, 20),
    *((sizes_resealed, name, 3) for name in PICKLED),
    *((pickled, name, 5) for name in PICKLED),
]
TABLE_KINDS = [
    (raw, "sparse/00001-of-00002.json", 10),
    (raw, "sparse/00000-of-00002.g0.00.arrow", 10),
    (manifest, "manifest.json", 15),
    (catalog, "sparse/00001-of-00002.json", 20),
    (sizes_resealed, "sparse/00000-of-00002.g0.00.arrow", 20),
    (sizes_resealed, "sparse/00001-of-00002.g1.00.arrow", 20),
]


def halves(values):
    """Yield JSON with half a surrogate pair in the place of each value, and as a key there."""
    for holder, key in list(places(values)):
        value = holder[key]
        for half in ("\ud800", {"\ud800": value}):
            holder[key] = half
            yield json.dumps(values).encode()
        holder[key] = value


@pytest.mark.slow
def test_half_a_surrogate_pair_anywhere_in_a_file_of_json_is_refused_or_changes_nothing(figures, tables_target):
    catalog = "sparse/00001-of-00002.json"
    manifest = "manifest.json"
    cases = [{tables_target.path(manifest): sealed(text)} for text in halves(tables_target.values(manifest))]
    cases += [tables_target.resealed(catalog, text) for text in halves(tables_target.values(catalog))]
    fuzz(figures, tables_target, cases, SEALED)


def cases_of(kinds, target, times, seed):
    """Return the cases by the kind of their faults."""
    rng = random.Random(seed)
    cases = {DAMAGE: [], SEALED: [], FORGED: []}
    for how, name, number in kinds:
        cases[{raw: DAMAGE, pickled: FORGED}.get(how, SEALED)] += [
            how(target, name, rng) for _ in range(math.ceil(number * times))
        ]
    return cases


@mostly_slow()
@pytest.mark.parametrize("faults", [DAMAGE, SEALED, FORGED])
def test_files_of_a_run_that_are_almost_right_are_refused(figures, run_target, faults):
    fuzz(figures, run_target, cases_of(KINDS, run_target, SHORT, 0)[faults], faults)


@mostly_slow()
@pytest.mark.parametrize("faults", [DAMAGE, SEALED])
def test_files_of_tables_that_are_almost_right_are_refused(figures, tables_target, faults):
    fuzz(figures, tables_target, cases_of(TABLE_KINDS, tables_target, SHORT, 0)[faults], faults)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_thousands_of_files_that_are_almost_right_are_refused(figures, run_target, tables_target, seed):
    for kinds, target in ((KINDS, run_target), (TABLE_KINDS, tables_target)):
        for faults, cases in cases_of(kinds, target, LONG, seed).items():
            if cases:
                fuzz(figures, target, cases, faults)


@pytest.fixture(scope="module", params=[IN_BRIEF, *(pytest.param(name, marks=pytest.mark.slow) for name in IN_FULL)])
def target(request, tmp_path_factory):
    """A delta of step 10, on a chain whose files are all there."""
    root, (run, interval, max_keep) = tmp_path_factory.mktemp("fuzz") / "runs", CHAINS[request.param]
    run(root, interval=interval, max_keep=max_keep, deltas=ALWAYS).train(10)
    target = Target(root)
    assert target.values("manifest.json")["kind"] == "delta"
    target.live, target.count = Live(root, run), f"bad inputs, {request.param}"
    return target


def link(target, name, rng):
    """Change a manifest below, and seal it: what stands on it says which it was."""
    values = json.loads(target.whole[target.root / name])
    values.pop("manifest_xxh3")
    return {target.root / name: sealed(mutated_json(values, rng))}


def kinds_of(target):
    below = [path.relative_to(target.root).as_posix() for path in target.whole if path.name == "manifest.json"]
    below.remove("ckpt_10/manifest.json")
    below_parts = [path.relative_to(target.root).as_posix() for path in target.whole if path.suffix == ".arrow"]
    return [
        *((raw, name, 10) for name in ("manifest.json", CATALOG, *target.parts)),
        *((how, name, 10) for how in (beside, link) for name in below),
        *((beside, name, 10) for name in below_parts if not name.startswith("ckpt_10/")),
        (manifest, "manifest.json", 60),
        (catalog, CATALOG, 40),
        *((sizes_resealed, name, 15) for name in target.parts),
    ]


@mostly_slow()
@pytest.mark.parametrize("faults", [DAMAGE, SEALED])
def test_files_of_a_chain_that_are_almost_right_are_refused(figures, target, faults):
    fuzz(figures, target, cases_of(kinds_of(target), target, SHORT_OF_DELTAS, 0)[faults], faults, target.count)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
def test_thousands_of_files_of_a_chain_that_are_almost_right_are_refused(figures, target, seed):
    for faults, cases in cases_of(kinds_of(target), target, LONG, seed).items():
        if cases:
            fuzz(figures, target, cases, faults, target.count)
