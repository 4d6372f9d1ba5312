"""Readers of a chain of which files are almost right: refused with an error of ours, or read as they were written."""

import json

import pytest
from faults.test_flips import ALWAYS
from faults.test_fuzz import (
    CATALOG,
    DAMAGE,
    LONG,
    SEALED,
    Live,
    Target,
    beside,
    cases_of,
    catalog,
    fuzz,
    manifest,
    raw,
    sizes_resealed,
)
from support.builders import Run
from support.forge import sealed
from support.live_builders import LiveRun
from support.mutations import mutated_json

SHORT = 0.1
CHAINS = {  # a chain of two links, one of five, and one of live tables
    "deltas, max_keep 1": (Run, 5, 1),
    "deltas, max_keep 2": (Run, 2, 2),
    "live tables, max_keep 2": (LiveRun, 2, 2),
}
IN_BRIEF, *IN_FULL = CHAINS


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


@pytest.mark.parametrize("faults", [DAMAGE, SEALED])
def test_files_of_a_chain_that_are_almost_right_are_refused(figures, target, faults):
    fuzz(figures, target, cases_of(kinds_of(target), target, SHORT, 0)[faults], faults, target.count)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
def test_thousands_of_files_of_a_chain_that_are_almost_right_are_refused(figures, target, seed):
    for faults, cases in cases_of(kinds_of(target), target, LONG, seed).items():
        if cases:
            fuzz(figures, target, cases, faults, target.count)
