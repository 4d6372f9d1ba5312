"""Figures of rows held against rows that were read one by one, and what is said of directories of every kind."""

import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from support.builders import Run, flip_bit
from support.delta_runs import run_with_chain
from support.forge import Forge, empty, filled, save_tables

import recckpt
from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.errors import CheckpointNotFoundError, MissingLibraryError
from recckpt.format import layout
from recckpt.inspect import report_page, report_rows
from recckpt.policies.deltas import Deltas
from recckpt.sparse import HashTable, SparseAdam, gen_slice
from recckpt.sparse.files.arrow_format import column_values

QUANTILES = (0.1, 0.5, 0.9, 0.99)


def columns_of(path, table):
    """Return the slots of all rows as float64."""
    reader = CheckpointReader(path)
    slots = reader.manifest.named_table(table).slots
    batches = list(reader.table(table))
    found = {slot: [column_values(b.column(slot.name), slot).reshape(len(b), -1) for b in batches] for slot in slots}
    return {slot.name: np.concatenate(values).astype(np.float64) for slot, values in found.items()}


def agrees(column, values):
    assert column.spread.n == len(values)
    assert (column.spread.least, column.spread.most) == pytest.approx((values.min(), values.max()))
    exact = np.quantile(values, QUANTILES, method="inverted_cdf")
    np.testing.assert_allclose(list(column.spread.quantiles.values()), exact, rtol=0.005)
    assert sum(column.bars.counts) + column.bars.zeros == len(values)
    assert column.bars.zeros == np.count_nonzero(values == 0)


def sharded(draw, n_rows, n_shards, dtype):
    """Return rows as those of several ranks: some dead, some never trained, some huge, some not finite."""
    ids = torch.from_numpy(draw.choice(10 * n_rows, n_rows, replace=False))
    rows = torch.from_numpy(draw.normal(size=(n_rows, 3))).to(dtype)
    moments = torch.from_numpy(draw.normal(size=(n_rows, 2))).to(dtype)
    rows[:20], rows[20:23] = 0.0, 1e4
    moments[10:40] = 0.0
    rows[50, 1], rows[51, 2], moments[52, 0] = math.nan, -math.inf, math.inf
    counts = torch.from_numpy(draw.zipf(1.5, n_rows).clip(0, 10**6))
    steps = torch.from_numpy(draw.integers(0, 1000, n_rows))
    shards = []
    for number in range(n_shards):
        part = gen_slice(number, n_shards)
        table = HashTable(3, name="item", dtype=dtype, slice=part, track=("count", "step"))
        table.add_slot("sparse_m", (2,), dtype)
        table.step = 999
        own = part.owns(ids)
        table.insert(ids[own], rows[own], {"sparse_m": moments[own], "count": counts[own], "last_step": steps[own]})
        shards.append([table])
    return shards, ids


@pytest.mark.parametrize(("shards", "dtype"), [(1, torch.float32), (3, torch.float64), (2, torch.bfloat16)])
def test_figures_are_those_of_all_rows(tmp_path, monkeypatch, shards, dtype):
    monkeypatch.setattr(report_rows, "_CHUNK_BYTES", 100 * 80)
    tables, ids = sharded(np.random.default_rng(0), 1000, shards, dtype)
    save_tables(tmp_path, *tables, batch_bytes=4000, step=1000)
    found = recckpt.report(tmp_path).table("item")

    columns = columns_of(tmp_path, "item")
    norms = np.sqrt(np.square(columns["embedding"]).sum(1))
    agrees(found.norms, norms[np.isfinite(norms)])
    agrees(found.counts, columns["count"][:, 0])
    agrees(found.ages_steps, 1000 - columns["last_step"][:, 0])
    assert (found.rows, found.rows_read, found.damage) == (1000, 1000, ())
    assert found.not_finite == {"embedding": 2, "sparse_m": 1}
    assert set(found.not_finite_ids) == set(ids[50:53].tolist())
    assert (found.dead, found.exploding, found.untrained) == (20, 3, 30)
    counts = np.sort(columns["count"][:, 0])[::-1]
    exact = np.searchsorted(np.cumsum(counts), 0.8 * counts.sum()) + 1
    assert found.busy == pytest.approx(exact, rel=0.02, abs=1)
    assert {row.id for row in found.largest[:3]} == set(ids[20:23].tolist())
    assert found.largest[0].norm == pytest.approx(1e4 * math.sqrt(3), rel=0.01)


def test_rows_of_a_chain_count_once_as_they_are_now(tmp_path, monkeypatch):
    monkeypatch.setattr(report_rows, "_MERGE_BYTES", 4000)  # many ranges of buckets
    run_with_chain(tmp_path)
    report = recckpt.report(tmp_path)
    newest = report.checkpoints[-1]
    assert len(newest.links) > 1
    assert newest.chain_bytes > newest.full_bytes
    found = report.table("item")
    columns = columns_of(tmp_path, "item")
    agrees(found.norms, np.sqrt(np.square(columns["embedding"]).sum(1)))
    assert found.rows_read == found.rows == len(columns["embedding"])


def test_rows_that_a_delta_has_replaced_or_deleted_count_nowhere(tmp_path):
    table = HashTable(2, name="item", track=("count",))
    table.add_slot("sparse_m", (2,), torch.float32)
    n_rows = 100
    rows, moments, counts = torch.ones(n_rows, 2), torch.ones(n_rows, 2), torch.ones(n_rows, dtype=torch.int64)
    rows[0], rows[1], rows[2], moments[3], moments[4] = 1e4, 0.0, math.nan, math.inf, 0.0
    rows[5], counts[5] = 3e30, 10**6
    table.insert(torch.arange(n_rows), rows, {"sparse_m": moments, "count": counts})
    saver = Saver(torch.nn.ModuleDict({"item": table}), None, str(tmp_path), deltas=True)
    saver.save("full")
    before = recckpt.report(tmp_path).table("item")
    assert (before.dead, before.untrained, before.not_finite) == (1, 1, {"embedding": 1, "sparse_m": 1})

    table.insert(torch.arange(5), torch.ones(5, 2), {"sparse_m": torch.ones(5, 2), "count": torch.ones(5).long()})
    table.erase(torch.tensor([5]))
    saver.save("delta")
    report = recckpt.report(tmp_path)
    found = report.table("item")
    assert len(report.checkpoints[-1].links) == 2
    assert (found.rows_read, found.dead, found.untrained, found.exploding) == (n_rows - 1, 0, 0, 0)
    assert (found.not_finite, found.not_finite_ids) == ({}, ())
    assert found.largest[0].norm == found.norms.spread.most == pytest.approx(math.sqrt(2))
    assert found.counts.spread.most == 1


@pytest.mark.slow
def test_only_zeros_are_untrained_and_values_that_float32_cannot_square_are_neither_zero_nor_infinite(tmp_path):
    table, extreme = HashTable(1, name="item"), empty("extreme")
    for slot in ("sparse_m", "sparse_v"):
        table.add_slot(slot, (2,), torch.float32)
    first = torch.tensor([[0.0, 0.0], [0.0, 1e-30], [0.0, -0.0], [0.0, math.nan]])
    second = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    table.insert(torch.arange(4), torch.ones(4, 1), {"sparse_m": first, "sparse_v": second})
    extreme.insert(torch.arange(4), torch.tensor([[1e-30, 0.0], [3e30, 0.0], [0.0, 0.0], [1.0, 1.0]]))
    waiting = filled("item.candidates", range(9), shape=1, dtype=torch.int64)
    save_tables(tmp_path, [table, extreme, waiting, empty("new")])
    report = recckpt.report(tmp_path)
    found = report.table("item")
    assert (found.untrained, found.not_finite, found.not_finite_ids) == (1, {"sparse_m": 1}, (3,))
    found = report.table("extreme")
    assert "1 at zero" in report.to_html()
    assert (found.dead, found.not_finite, found.untrained) == (1, {}, None)
    assert found.norms.spread.most == pytest.approx(3e30)
    waiting, new = report.table("item.candidates"), report.table("new")
    assert (waiting.norms, waiting.dead, waiting.exploding) == (None, None, None)
    assert (new.norms, new.rows_read, new.damage) == (None, 0, ())
    assert all("item.candidates" not in finding.what and "new" not in finding.what for finding in report.findings)


def test_damaged_batches_are_said_and_left_out_of_the_figures(tmp_path):
    save_tables(tmp_path, [filled("item", range(1000)), filled("user", range(10))], concurrency=1, batch_bytes=2000)
    forge = Forge(tmp_path / "ckpt_1")
    path = forge.path(forge.parts[0])
    path.write_bytes(path.read_bytes().replace(np.float32(7).tobytes() * 2, np.float32(8).tobytes() * 2, 1))
    report = recckpt.report(tmp_path)
    item = report.table("item")
    assert 0 < item.rows_read < 1000
    assert "checksum" in item.damage[0]
    assert not report.is_healthy
    assert "--skip-damaged" in report.findings[0].remedy


def test_damage_beside_the_rows_is_said_too(tmp_path):
    Run(tmp_path).train(10)
    for name in ("model.pt", "extra.pt"):
        flip_bit(tmp_path / "ckpt_10" / name)
    report = recckpt.report(tmp_path)
    assert len(report.damage) >= 2
    assert [finding.level for finding in report.findings] == ["problem"]
    quick = recckpt.report(tmp_path, deep=False)
    assert (quick.is_healthy, quick.deep) == (True, False)  # the page says that nothing was read


@pytest.mark.parametrize("place", [None, 6])  # behind the name of the format no reader looks, but a restore does
def test_a_damaged_link_of_a_chain_is_said_of_its_tables(tmp_path, place):
    run_with_chain(tmp_path)
    forge = Forge(tmp_path / recckpt.report(tmp_path, deep=False).checkpoints[-1].links[-1])
    for name in forge.parts:
        flip_bit(forge.path(name), place)
    report = recckpt.report(tmp_path)
    assert all(table.damage and table.rows_read == (table.rows if place else 0) for table in report.tables)
    assert not place or all("frame" in table.damage[0] for table in report.tables)
    assert not report.is_healthy


def test_a_run_is_seen_whole_on_a_disk_and_in_a_bucket(tmp_path, memory_url):
    for url in (tmp_path, memory_url):
        Run(url, max_keep=2).train(30)
        report = recckpt.report(str(url))
        assert [each.ckpt_id for each in report.checkpoints] == ["ckpt_20", "ckpt_30"]
        assert [save.ckpt_id for save in report.saves] == ["ckpt_10", "ckpt_20", "ckpt_30"]
        assert all(save.blocked_sec > 0 and save.n_bytes > 0 for save in report.saves)
        assert report.checkpoints[-1].tables == {table.name: table.rows for table in report.tables}
        assert (report.findings, report.newest) == ((), "ckpt_30")
        assert json.loads(json.dumps(report.to_dict()))["healthy"] is True
        assert repr(report).endswith(": healthy: 2 checkpoints, the newest ckpt_30>")
    quick = recckpt.report(tmp_path, deep=False)
    assert [table.rows_read for table in quick.tables] == [0, 0]
    assert "<h1>" in quick.to_html()


def test_it_writes_nothing_and_tells_what_a_newer_version_wrote_from_damage(tmp_path):
    Run(tmp_path).train(10)
    (tmp_path / "ckpt_5").mkdir()
    (tmp_path / "ckpt_5" / layout.INTENT).write_text("{}")
    lines = [{"ckpt_id": "a", "blocked_sec": 0.5, "max_blocked_sec": 2.5}, {"ckpt_id": "b", "blocked_sec": 0.5}]
    (tmp_path / layout.TIMELINE).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def state():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    before = state()
    report = recckpt.report(tmp_path)
    assert state() == before
    assert [save.blocked_sec for save in report.saves] == [2.5, 0.5], "of the rank that waited longest, where known"
    shutil.rmtree(tmp_path / "ckpt_5")
    forge = Forge(tmp_path / "ckpt_10")
    forge.write_manifest({**forge.manifest, "version": 99})
    report = recckpt.report(tmp_path)
    assert [left.what for left in report.leftovers] == ["newer"]
    assert not report.is_healthy


def test_of_the_links_below_only_files_with_rows_are_bytes_that_a_restore_reads(tmp_path):
    model = torch.nn.ModuleDict({"item": filled("item", range(50)), "top": torch.nn.Linear(100, 100)})
    saver = Saver(model, None, str(tmp_path), None, deltas=Deltas(max_chain_bytes=100, max_dirty=1.0))
    for step in range(6):
        model["item"].insert(torch.tensor([step]), torch.ones(1, 2))
        saver.save(f"ckpt_{step}")
    report = recckpt.report(tmp_path)
    newest, manifest = report.checkpoints[-1], CheckpointReader(tmp_path).manifest
    dense = sum(file.n_bytes for file in manifest.files if not layout.has_rows(file.name))
    assert len(newest.links) == 6
    assert newest.chain_bytes == sum(each.n_bytes for each in report.checkpoints) - 5 * dense
    of_chains = [finding.what for finding in report.findings if "is a chain of" in finding.what]  # a save may be slow
    assert not of_chains, "the network, which each delta holds whole, is no reason to compact"


def test_what_crashes_left_and_damaged_checkpoints_come_with_what_to_do(tmp_path):
    Run(tmp_path, max_keep=None).train(30)
    (tmp_path / "ckpt_20/model.pt").unlink()
    (tmp_path / "ckpt_10/manifest.json").unlink()  # half removed
    report = recckpt.report(tmp_path)
    assert {left.directory: left.what for left in report.leftovers} == {"ckpt_20": "damaged", "ckpt_10": "unfinished"}
    [damaged, unfinished] = report.findings
    assert (damaged.level, unfinished.level) == ("problem", "warning")
    assert "recckpt verify" in damaged.remedy
    (tmp_path / "ckpt_30/manifest.json").write_text("{")
    gone = recckpt.report(tmp_path)
    assert (gone.newest, gone.tables) == (None, ())
    assert "No checkpoint here can be used" in gone.findings[0].what
    assert "<h1>" in gone.to_html()


def test_empty_foreign_and_wrong_places_are_a_message(tmp_path, memory_url):
    Run(tmp_path / "run").train(10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/manifest.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    said = {
        "nowhere": "does not exist",
        "empty": "found no committed checkpoint",
        "foreign": "found no committed checkpoint",
        "file": "not a directory",
        "run/ckpt_10": "is a checkpoint itself",
    }
    for name, what in said.items():
        with pytest.raises(CheckpointNotFoundError, match=what):
            recckpt.report(tmp_path / name)
    with pytest.raises(CheckpointNotFoundError, match="found no committed checkpoint"):
        recckpt.report(memory_url)
    with pytest.raises(TypeError, match="3"):
        recckpt.report(3)
    with pytest.raises(ValueError, match="threads"):
        recckpt.report(tmp_path, threads=0)


ODD_LINES = [
    "not json",
    "[1, 2]",
    '"text"',
    "null",
    "[" * 100_000,
    '{"ckpt_id": 3, "step": "x", "kind": [], "time": {}, "blocked_sec": "long", "n_bytes": true}',
    '{"ckpt_id": "a", "step": 1' + "0" * 400 + ', "n_bytes": 1e999, "n_rows": -5, "total_sec": 1' + "0" * 400 + "}",
    '{"ckpt_id": "\\ud800<script>", "blocked_sec": NaN, "write_sec": 1e308, "error": "<b>\\n"}',
]


def test_lines_of_a_timeline_may_be_anything(tmp_path):
    Run(tmp_path).train(20)
    timeline = tmp_path / layout.TIMELINE
    timeline.write_bytes("\n".join([timeline.read_text(), *ODD_LINES, ""]).encode() + b"\xff\xfe\n{")
    report = recckpt.report(tmp_path)
    assert len(report.saves) == 5
    assert report.saves[-1].write_sec is None
    assert report.to_html().encode()
    assert str(report)
    assert json.dumps(report.to_dict(), allow_nan=False)
    timeline.unlink()
    timeline.mkdir()
    assert recckpt.report(tmp_path).saves == ()


def test_metrics_and_learning_rates_come_first_by_save_of_all_that_are_in_the_timeline(tmp_path):
    table = HashTable(2, name="item")
    sparse = SparseAdam([table], lr=0.25)
    with Saver(torch.nn.ModuleDict({"item": table}), sparse, str(tmp_path), max_keep=1) as saver:
        manager = CheckpointManager(saver, 1)
        for loss, far in ((-1.5, 1e308), (2.5, -1e308), (0.5, 0.0), (math.nan, math.inf)):
            manager.step(metrics={"loss": loss, "far": far}, state={"epoch": "first"}, event_time=1.7e9)
    report = recckpt.report(tmp_path)
    assert len(report.checkpoints) == 1
    assert [save.metrics for save in report.saves] == [
        {"loss": -1.5, "far": 1e308, "sparse_lr_0": 0.25},
        {"loss": 2.5, "far": -1e308, "sparse_lr_0": 0.25},
        {"loss": 0.5, "far": 0.0, "sparse_lr_0": 0.25},
        {"loss": "nan", "far": "inf", "sparse_lr_0": 0.25},
    ]
    assert json.dumps(report.to_dict(), allow_nan=False)
    head, loss, far, rate, *_ = str(report).splitlines()
    assert head.split() == ["METRIC", "NEWEST", "BEFORE", "LEAST", "GREATEST", "LAST", "SAVES"]
    assert loss.split() == ["loss", "nan", "0.5", "-1.5", "2.5", "▁█▅·"]
    assert far.split() == ["far", "inf", "0", "-1e+308", "1e+308", "█▁▅·"]
    assert rate.split() == ["sparse_lr_0", "0.25", "0.25", "0.25", "0.25", "▁▁▁▁"]
    pytest.importorskip("matplotlib")
    page = report.to_html()
    assert page.index("<h2>Metrics</h2>") < page.index("<figcaption>loss, by step") < page.index("What needs attention")
    assert re.search(r">\s*-1\s*<", page), "an axis that begins below zero"


def test_a_page_draws_the_first_metrics_and_says_of_how_many(tmp_path):
    pytest.importorskip("matplotlib")

    def drawn(n_metrics):
        with Saver(torch.nn.Linear(1, 1), output_dir=str(tmp_path / str(n_metrics))) as saver:
            CheckpointManager(saver, 1).step(metrics={f"m{n}": float(n) for n in range(n_metrics)})
        page = recckpt.report(tmp_path / str(n_metrics)).to_html()
        return len(re.findall("<figcaption>m[0-9]+, by", page)), re.findall("the first .* are drawn", page)

    assert drawn(8) == (8, [])
    assert drawn(11) == (8, ["the first 8 of 11 metrics are drawn"])


def test_lines_that_hardly_change_are_drawn_below_the_top_edge():
    pytest.importorskip("matplotlib")
    svg = report_page.lines([1, 2], [[1996.0, 2000.0]], report_page.short)
    (top,) = re.findall(r'<rect x="[\d.]+" y="([\d.]+)"', svg)
    points = [float(y) for y in re.findall(r'<use xlink:href="[^"]*" x="[\d.]+" y="([\d.]+)" style="fill: #', svg)]
    assert len(points) == 2
    assert min(points) > float(top) + 2
    assert "<svg" in report_page.lines([1, 2], [[None, 0.0]], report_page.n_bytes)
    assert [report_page.n_bytes(value) for value in (0, 3e5, 2.5e6)] == ["0 B", "300 kB", "2.5 MB"]


def test_a_notebook_shows_the_page_and_without_matplotlib_the_text_and_the_page_names_the_extra(tmp_path, monkeypatch):
    save_tables(tmp_path, [filled("item", range(3))])
    report = recckpt.report(tmp_path)
    assert report._repr_html_() in report.to_html()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report._repr_html_() is None
    with pytest.raises(MissingLibraryError, match=r"recckpt\[report\]"):
        report.to_html()


def test_a_chain_costs_what_its_files_and_those_that_a_restore_reads_have(tmp_path):
    run_with_chain(tmp_path)
    save_tables(tmp_path, [filled("item", range(3))], ckpt_id="ckpt_4")
    found = recckpt.report(tmp_path)
    size_of = {each.ckpt_id: each.n_bytes for each in found.checkpoints}
    first, second = found.chains
    assert (first.base, first.newest, first.n_deltas, first.n_links) == ("ckpt_1", "ckpt_3", 2, 3)
    assert first.kept_bytes == size_of["ckpt_1"] + size_of["ckpt_2"] + size_of["ckpt_3"]
    assert (first.base_bytes, first.read_bytes) == (size_of["ckpt_1"], found.checkpoints[2].chain_bytes)
    assert (second.base, second.newest, second.n_deltas) == ("ckpt_4", "ckpt_4", 0)
    assert second.kept_bytes == second.read_bytes == size_of["ckpt_4"]
    assert "What chains cost" in found.to_html()
