"""T7: damage of any kind to a file of any kind is found by verify and by restore, which takes the checkpoint before."""

import logging
import os
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import pytest
from support.builders import Run, state_of
from support.forge import Forge
from support.forked import outcomes
from support.live_runs import LiveRun
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt import Deltas
from recckpt.errors import FormatVersionError
from recckpt.inspect.verify import verify

FLIPS = 5000
PAGE = 4096
CATALOG = "sparse/00000-of-00001.json"
INDEX = "dense/00000-of-00001.json"
PICKLED = ["model.pt", "extra.pt", "io_state_0.pt", "rng_0.pt"]


@dataclass(frozen=True)
class Scene:
    """A run, and which of its checkpoints is damaged."""

    deltas: bool | Deltas
    max_keep: int
    step: int  # of the one that is damaged
    steps: int  # of the newest: where this is greater, it is read from the rows of the damaged one too
    run: type[Run] = Run


ALWAYS = Deltas(max_dirty=1.0, max_chain_bytes=1000.0)
SCENES = {
    "full": Scene(False, 3, 10, 10),
    "delta": Scene(ALWAYS, 1, 10, 10),
    "a link below": Scene(ALWAYS, 2, 10, 15),
    "live delta": Scene(ALWAYS, 1, 10, 10, LiveRun),
    "live link below": Scene(ALWAYS, 2, 10, 15, LiveRun),
}


class Damaged:
    """A checkpoint in all ways of being damaged, and a run that restores the one before it."""

    def __init__(self, root, scene):
        self.begin, is_live = partial(scene.run, root), scene.run is LiveRun
        run = self.begin(interval=5, max_keep=scene.max_keep, deltas=scene.deltas).train(scene.steps)
        run.saver.close()
        kind = "live tables" if is_live else "deltas"
        self.harness = f"T7, {kind}, max_keep {scene.max_keep}" if scene.deltas else "T7"
        self.root, self.newer, self.older = root, Forge(root / "ckpt_10"), Forge(root / "ckpt_5")
        self.newest, self.is_newest = scene.steps, scene.step == scene.steps
        assert any(".deletes." in name for name in self.newer.parts) == (scene.deltas is not False and not is_live)
        self.names = ["manifest.json", CATALOG, *self.newer.parts, *([INDEX, *PICKLED] if self.is_newest else [])]
        self.whole = {name: self.newer.path(name).read_bytes() for name in self.names}
        self.renew()
        self.state = state_of(self.run)
        self.said = []

    def renew(self):
        """Make the run anew: it is of the process that made it."""
        self.run, self.made_by = self.begin(interval=1000, seed=5), os.getpid()
        assert self.run.manager.restore(5) == 5

    def flips(self, count, seed=0):
        rng = random.Random(seed)
        for number in range(count):
            name = self.names[number % len(self.names)]
            data = bytearray(self.whole[name])
            bit = rng.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            yield "flips", {name: bytes(data)}

    def flips_at_the_ends(self):
        """Yield flips where a file says what it is: random ones seldom fall on what no column checksum covers."""
        for name, data in self.whole.items():
            for at in sorted({place % len(data) for place in (0, 7, 60, 300, -1, -8, -70, -300)}):
                yield "flips", {name: data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]}

    def zero_pages(self):
        for name, data in self.whole.items():
            for begin in range(0, len(data), min(PAGE, -(-len(data) // 2))):
                rest = data[begin + PAGE :]
                yield "zero pages", {name: data[:begin] + bytes(len(data) - begin - len(rest)) + rest}

    def cuts(self, seed=0):
        rng = random.Random(seed)
        for name, data in self.whole.items():
            lengths = {0, 1, len(data) // 2, len(data) - 1, *(rng.randrange(len(data)) for _ in range(8))}
            yield from (("truncations", {name: data[:length]}) for length in sorted(lengths))

    def swaps(self):
        for one, other in combinations(self.names, 2):
            yield "swaps", {one: self.whole[other], other: self.whole[one]}

    def stale(self):
        for name in self.names:
            if self.older.path(name).exists():
                yield "stale files", {name: self.older.path(name).read_bytes()}

    def others(self):
        """Return all faults but the flips, each of which changes something."""
        found = [*self.zero_pages(), *self.cuts(), *self.swaps(), *self.stale()]
        return [case for case in found if any(self.whole[name] != data for name, data in case[1].items())]

    def put(self, files):
        """Put files in the place of others, under new inodes: the old ones may be mapped."""
        for name, data in {**self.whole, **files}.items():
            path = self.newer.path(name)
            if path.read_bytes() != data:
                path.unlink()
                path.write_bytes(data)

    def look(self, case):
        """Damage the newer checkpoint, verify and restore, and say in a word what came of it."""
        _, files = case
        if self.made_by != os.getpid():
            self.renew()
        self.put(files)
        try:
            return self.verified(files) or self.restored(files)
        finally:
            self.put({})

    def verified(self, files):
        named = {problem.file for problem in verify(str(self.root))}
        if "ckpt_10/INTENT" in named and "manifest.json" in files:  # a manifest of another save: the two disagree
            return ""
        return "" if named & {f"ckpt_10/{name}" for name in files} else f"UNSEEN by verify, which names {named}"

    def restored(self, files):
        said = []
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("recckpt").addHandler(handler)
        try:
            step = self.run.manager.restore()
        except FormatVersionError:
            return "version" if "manifest.json" in files else "WRONG version"
        finally:
            logging.getLogger("recckpt").removeHandler(handler)
        if step != 5 or state_of(self.run) != self.state:
            return f"UNSEEN by restore: step {step}"
        line = said[0]
        assert len(said) == 1 or not self.is_newest, said  # one error that says it all
        named = [name for name in files if f"ckpt_10/{name}" in line]
        if files.keys() == {"manifest.json"}:  # of another checkpoint: the other files do not fit it
            named = ["ckpt_10/" in line]
        return "found" if named and " found " in line and ", expected " in line else f"SAID {line}"


IN_BRIEF = ("full", "delta")  # of the default suite
IN_FULL = [pytest.param(name, marks=pytest.mark.slow) for name in SCENES if name not in IN_BRIEF]


@pytest.fixture(scope="module", params=[*IN_BRIEF, *IN_FULL])
def damaged(request, tmp_path_factory):
    return Damaged(tmp_path_factory.mktemp("flips") / "runs", SCENES[request.param])


def all_are_found(figures, damaged, cases):
    found = outcomes(damaged.look, cases)
    damaged.put({})
    bad = [(kind, sorted(files), text) for (kind, files), text in zip(cases, found, strict=True) if text != "found"]
    refused = [text for _, names, text in bad if text == "version" and names == ["manifest.json"]]
    assert len(bad) == len(refused), bad[:5]
    assert len(refused) <= 1 + len(cases) // 500, "a few bits of the manifest only are the number of its version"
    counts = {kind.replace(" ", "_"): count for kind, count in Counter(kind for kind, _ in cases).items()}
    figures.add(damaged.harness, **counts, found=len(cases), refused_by_version=len(refused), crashes=0)


@mostly_slow()
def test_a_whole_checkpoint_is_restored_without_an_error(damaged):
    words = outcomes(damaged.look, [("nothing", {})] * 2)
    assert [word.split(",")[0] for word in words] == ["UNSEEN by verify"] * 2
    assert damaged.restored({}) == f"UNSEEN by restore: step {damaged.newest}"


@mostly_slow()
def test_some_flipped_bits_are_found(figures, damaged):
    all_are_found(figures, damaged, [*damaged.flips(10, seed=1), *list(damaged.flips_at_the_ends())[::8]])


@mostly_slow()
def test_some_zeroed_pages_cuts_swaps_and_stale_files_are_found(figures, damaged):
    others = damaged.others()
    cases = [*others[:: len(others) // 6], *damaged.stale()]
    all_are_found(figures, damaged, cases)


@pytest.mark.slow
def test_thousands_of_flipped_bits_are_found(figures, damaged):
    all_are_found(figures, damaged, [*damaged.flips(FLIPS // SWEEP_STRIDE), *damaged.flips_at_the_ends()])


@pytest.mark.slow
def test_all_zeroed_pages_cuts_swaps_and_stale_files_are_found(figures, damaged):
    all_are_found(figures, damaged, damaged.others()[::SWEEP_STRIDE])
