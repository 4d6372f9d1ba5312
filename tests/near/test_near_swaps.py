"""Files of near saves that stand in the place of others: of another shard, near save, epoch or run, or another file.

Each of them is whole, and its checksums are right: only what says where it belongs can tell.
"""

import shutil
from itertools import combinations

import pytest
from near.test_near_saves import rows
from near.test_ranks import near_names, on_hosts, together, trained
from support.near_runs import NearRun
from support.sweeps import SWEEP_STRIDE

HOSTS = ["a", "b"]
BEFORE = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0, 6: 6.0}
NEWEST = BEFORE | {7: 7.0, 8: 8.0}


def files_in(directory):
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != "INTENT")
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def newest_on(root):
    return root / "a" / near_names(root, "a")[-1]


def other_shard(name):
    """Return the name of the same file of the other shard; its own where it is that of no shard."""
    for one, other in (("00000-", "00001-"), ("_0.", "_1.")):
        if one in name or other in name:
            return name.replace(one, "?").replace(other, one).replace("?", other)
    return name


def made(root, value):
    """Make near saves in two epochs on hosts that have all; return the files of an older epoch, and of the last two."""
    on_hosts(root, HOSTS, trained)
    epoch = files_in(newest_on(root))

    def goes_on(run):
        run.restore().put(_6=6.0).step()
        before = files_in(newest_on(root))
        run.put(_7=7.0, _8=value).step()
        return before

    before, _ = on_hosts(root, HOSTS, goes_on)
    return epoch, before, files_in(newest_on(root))


class Scene:
    """The newest near save of a run on two hosts, and what is put in the place of its files."""

    def __init__(self, root):
        *_, of_another_run = made(root / "other", 8.5)
        self.root = root / "own"
        epoch, before, self.whole = made(self.root, 8.0)
        self.directory = newest_on(self.root).relative_to(self.root / "a")
        self.sources = {
            "another epoch": epoch,
            "another near save": before,
            "another run": of_another_run,
            "another shard": {name: self.whole.get(other_shard(name), b"") for name in self.whole},
        }
        assert rows(self.restored()) == NEWEST

    def swaps(self):
        """Yield files that are to be others: each by each, in pairs, and all of one shard, with its seal or without."""
        for source in self.sources.values():
            for name in self.whole.keys() & source.keys():
                yield {name: source[name]}
            for shard in ("00000-", "00001-"):
                names = [name for name in self.whole if shard in name and name in source]
                yield {name: source[name] for name in names}
            yield {name: source[name] for name in self.whole.keys() & source.keys() if name != "near.json"}
            yield source
        for one, other in combinations(self.whole, 2):
            yield {one: self.whole[other], other: self.whole[one]}

    def put(self, host, files):
        """Have these files on a host, and those that belong there beside them."""
        directory = self.root / host / self.directory
        shutil.rmtree(directory)
        for name, data in (self.whole | files).items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def restored(self):
        return NearRun(self.root, near="b").restore()


@pytest.mark.parametrize("n_swaps", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_what_belongs_elsewhere_is_passed_over(tmp_path, n_swaps, record_property):
    scene, tried = Scene(tmp_path), 0
    swaps = [files for files in scene.swaps() if any(scene.whole.get(name) != data for name, data in files.items())]
    stride = SWEEP_STRIDE if n_swaps is None else len(swaps) // n_swaps
    for files in swaps[::stride]:
        scene.put("b", files)
        scene.put("a", {})
        assert rows(scene.restored()) == BEFORE, list(files)
        left = on_hosts(scene.root, HOSTS, lambda run: rows(run.restore()))
        assert together(left) == NEWEST, f"{list(files)}: the other host has what belongs there"
        for host in HOSTS:  # the restore has mended one
            scene.put(host, files)
        left = on_hosts(scene.root, HOSTS, lambda run: rows(run.restore()))
        assert together(left) == BEFORE, list(files)
        tried += 3
        scene.put("a", {})
        scene.put("b", {})
    record_property("figures", {"T3, swaps in near saves": {"restores": tried, "wrong": 0}})
    assert together(on_hosts(scene.root, HOSTS, lambda run: rows(run.restore()))) == NEWEST
