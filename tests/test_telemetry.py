"""What OpenTelemetry is told of saves and loads, by its own SDK; and that nothing of it is needed."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support import warm_python
from support.builders import Run
from support.forked import in_fork
from support.gate import Gate
from support.near_runs import NearRun
from support.paths import ROOT
from support.rank_processes import results, run_script
from torch import nn

import recckpt
from recckpt import Saver, telemetry
from recckpt.errors import CheckpointExistsError, SaveFailedError
from recckpt.save.job import SparseSaver
from recckpt.sparse import HashTable


class Told:
    """What an SDK has collected."""

    def __init__(self):
        self.reader, self.exporter = InMemoryMetricReader(), InMemorySpanExporter()
        self.meters, self.tracers = MeterProvider([self.reader]), TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self):
        return [
            (span.name, span.status.status_code.name, dict(span.attributes))
            for span in self.exporter.get_finished_spans()
        ]

    @property
    def metrics(self):
        """Return name -> (attributes but the run -> value; of a histogram how often and how much)."""
        return {
            name: {attributes[:-1]: value for attributes, value in points.items()}
            for name, points in self.metrics_of_runs.items()
        }

    @property
    def metrics_of_runs(self):
        """Return name -> (attributes -> value; of a histogram how often and how much)."""
        found = {}
        data = self.reader.get_metrics_data()
        for scope in [
            scope for resource in (data.resource_metrics if data else []) for scope in resource.scope_metrics
        ]:
            assert (scope.scope.name, scope.scope.version) == ("recckpt", recckpt.__version__)
            for metric in scope.metrics:
                assert {sorted(point.attributes)[-1] for point in metric.data.data_points} == {"recckpt.run"}
                points = {
                    tuple(value for _, value in sorted(point.attributes.items())): (
                        (point.count, point.sum) if hasattr(point, "count") else point.value
                    )
                    for point in metric.data.data_points
                }
                found[metric.name] = points
        return found


@pytest.fixture
def told(monkeypatch):
    told = Told()
    monkeypatch.setattr(metrics, "get_meter", lambda *scope: told.meters.get_meter(*scope))
    monkeypatch.setattr(trace, "get_tracer", lambda *scope: told.tracers.get_tracer(*scope))
    telemetry._tools.cache_clear()
    telemetry._say.cache_clear()
    yield told
    telemetry._tools.cache_clear()


def saver_of(path, **options):
    table = HashTable(2, name="t")
    table(torch.arange(50))
    return Saver(nn.ModuleDict({"t": table}), output_dir=str(path), max_keep=None, **options)


def failing(*_, **__):
    raise OSError(28, "No space left on device")


def test_saves_are_counted_and_measured_by_kind(tmp_path, told):
    saver = saver_of(tmp_path, deltas=recckpt.Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1.0))
    first = saver.save("a", step=7)
    second = saver.save_async("b").wait()
    found = told.metrics
    assert found["recckpt.saves"] == {("full", "ok"): 1, ("delta", "ok"): 1}
    assert found["recckpt.save.bytes"] == {(): first.n_bytes + second.n_bytes}
    assert found["recckpt.save.rows"] == {(): 50}
    assert found["recckpt.chain.length"] == {(): 2}
    assert found["recckpt.last_save.time"][()] > 1.7e9
    (n_pauses, paused), (n_saves, saved) = found["recckpt.save.pause"][()], found["recckpt.save.duration"]["full", "ok"]
    assert (n_pauses, n_saves) == (2, 1)
    assert 0 < saved < 100
    assert 0 < paused < 100
    assert found["recckpt.failures"] == {("save",): 0}, "there before the first, for Prometheus"
    assert found["recckpt.save.under_way"] == {(): 0}
    assert found["recckpt.storage.retries"] == {(): 0}
    assert found["recckpt.storage.free"][()] > 0
    [(name, status, attributes), (_, _, of_second)] = told.spans
    assert (name, status) == ("recckpt.save", "UNSET")
    assert attributes == {
        **{
            "recckpt.run": str(tmp_path),
            "recckpt.id": "a",
            "recckpt.step": 7,
            "recckpt.kind": "full",
            "recckpt.links": 1,
            "recckpt.rows": 50,
        },
        **{"recckpt.bytes": first.n_bytes, "recckpt.background": False, "recckpt.ephemeral": False},
    }
    assert (of_second["recckpt.kind"], of_second["recckpt.background"]) == ("delta", True)
    assert "recckpt.step" not in of_second


@pytest.mark.parametrize("background", [False, True])
def test_a_span_ends_whatever_becomes_of_the_save(tmp_path, told, monkeypatch, background):
    saver = saver_of(tmp_path)
    save = saver.save_async if background else saver.save

    def ends_with(error, place, broken):
        with monkeypatch.context() as patch:
            patch.setattr(place, broken)
            with pytest.raises(error):
                getattr(save("a"), "wait", lambda: None)()
        name, status, attributes = told.spans[-1]
        assert (name, status) == ("recckpt.save", "ERROR")
        assert not {"recckpt.bytes", "recckpt.rows"} & attributes.keys(), "nothing was saved"
        return attributes["error.type"]

    def interrupted(*_):
        raise KeyboardInterrupt

    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    assert ends_with(SaveFailedError, "recckpt.save.save.write", failing) == "SaveFailedError"
    assert ends_with(SaveFailedError, "recckpt.save.propose.check", failing) == "SaveFailedError"
    assert ends_with(KeyboardInterrupt, "recckpt.save.propose.check", interrupted) == "KeyboardInterrupt"
    assert ends_with(KeyboardInterrupt, "recckpt.save.save.write", interrupted) == "KeyboardInterrupt"
    n_failed = 4
    if background:
        assert ends_with(RuntimeError, "threading.Thread.start", no_thread) == "RuntimeError"
        n_failed += 1
    assert len(told.spans) == n_failed, "each ends once"
    assert sum(told.metrics["recckpt.failures"].values()) == n_failed
    save("a")
    saver.close()
    with pytest.raises(CheckpointExistsError):
        saver.save("a")
    found = told.metrics
    assert found["recckpt.failures"] == {("save",): n_failed + 1}
    assert told.spans[-1][2]["error.type"] == "CheckpointExistsError"
    assert found["recckpt.saves"]["full", "ok"] == 1
    assert found["recckpt.last_save.time"]


def test_loads_and_restores_are_told_and_those_that_fail_too(tmp_path, told, monkeypatch):
    Run(tmp_path, interval=2).train(2)
    fresh = Run(tmp_path, interval=2)
    assert fresh.manager.restore() == 2
    fresh.saver.load("ckpt_2")
    with monkeypatch.context() as patch:
        patch.setattr("recckpt.load.loader.loading.load", failing)
        with pytest.raises(OSError, match="No space"):
            fresh.saver.load("ckpt_2")
    loads = [span for span in told.spans if span[0] == "recckpt.load"]
    assert [status for _, status, _ in loads] == ["UNSET", "UNSET", "ERROR"]
    name = {"recckpt.run": str(tmp_path), "recckpt.id": "ckpt_2", "recckpt.step": 2, "recckpt.kind": "full"}
    assert loads[0][2].items() >= name.items()
    assert loads[0][2]["recckpt.rows"] == sum(len(table) for table in fresh.model.tables)
    assert loads[2][2] == {**name, "error.type": "OSError"}
    found = told.metrics
    assert found["recckpt.loads"] == {("ok",): 2, ("failed",): 1}
    assert found["recckpt.load.duration"]["ok",][0] == 2
    assert found["recckpt.failures"] == {("load",): 1, ("save",): 0}


def test_near_saves_are_counted_and_the_steps_that_a_loss_costs_measured(tmp_path, told, monkeypatch):
    run = NearRun(tmp_path).put(_1=1.0, _2=1.0, _3=1.0).step().put(_1=2.0).step()
    with monkeypatch.context() as patch:
        patch.setattr(SparseSaver, "save", failing)
        run.put(_2=2.0).step().put(_2=3.0).step()
    found = told.metrics
    assert (found["recckpt.near.saves"], found["recckpt.near.failures"]) == ({(): 1}, {(): 2})
    assert (found["recckpt.near.lag"], found["recckpt.lag"]) == ({(): 2}, {(): 3}), "as the last one was due"
    assert found["recckpt.near.bytes"][()] > 0
    assert found["recckpt.near.last_save.time"][()] > 1.7e9
    (n_pauses, paused), (n_made, seconds) = found["recckpt.near.pause"][()], found["recckpt.near.duration"][()]
    assert (n_pauses, n_made) == (1, 1)
    assert 0 < paused <= seconds


def test_two_savers_in_one_process_are_told_apart_by_their_runs_or_output_dirs(tmp_path, told):
    for run in ("", 7, b"clicks"):
        with pytest.raises(TypeError, match="run must be the name of this job, or None, found"):
            saver_of(tmp_path / "made", run=run)
    assert not (tmp_path / "made").exists()
    saver_of(tmp_path / "clicks", run="clicks").save("a")
    other = saver_of(tmp_path / "clicks-2", run="orders")
    other.save("a")
    other.load()
    found = told.metrics_of_runs
    assert found["recckpt.saves"] == {("full", "ok", "clicks"): 1, ("full", "ok", "orders"): 1}
    assert found["recckpt.loads"] == {("ok", "orders"): 1}
    assert found["recckpt.last_save.time"].keys() == found["recckpt.save.under_way"].keys()
    assert found["recckpt.save.under_way"].keys() >= {("clicks",), ("orders",)}
    assert [attributes["recckpt.run"] for _, _, attributes in told.spans] == ["clicks", "orders", "orders"]
    dirs = [f"{tmp_path}/{team}/clicks" for team in ("ads", "shop")]  # which end in one name
    assert saved_to_two_of_one_name(tmp_path, told)[-2:] == dirs


def saved_to_two_of_one_name(tmp_path, told):
    """Save to two output dirs that end in one name, and return what their series call them."""
    for team in ("ads", "shop"):
        saver_of(tmp_path / team / "clicks").save("a")
    return [run for (run,) in told.metrics_of_runs["recckpt.last_save.time"]]


def test_a_save_under_way_shows_for_how_long_it_has_gone_on(tmp_path, told, monkeypatch):
    saver = saver_of(tmp_path)
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = saver.save_async("a")
    assert gate.reached.wait(60)
    first, second = (told.metrics["recckpt.save.under_way"][()] for _ in range(2))
    of_child = in_fork(lambda: told.metrics_of_runs.get("recckpt.save.under_way"))  # an exporter goes on in a child
    gate.opened.set()
    handle.wait()
    assert 0 < first < second
    assert of_child == "None", "the save is not of the child, which never hears of its end"
    assert told.metrics["recckpt.save.under_way"] == {(): 0}


@pytest.mark.parametrize("damage", [lambda file: file[:-100], lambda file: file[:200] + b"?" * 8 + file[208:]])
def test_a_restore_tells_the_age_of_its_checkpoint_and_that_it_fell_back(tmp_path, told, damage):
    Run(tmp_path, interval=2, max_keep=3).train(4)
    older, newest = recckpt.list_checkpoints(str(tmp_path))
    manifest = next(tmp_path.glob(f"{newest.ckpt_id}*/manifest.json"))
    damaged = next(path for path in manifest.parent.rglob("*.arrow"))
    damaged.write_bytes(damage(damaged.read_bytes()))
    assert Run(tmp_path, interval=2).manager.restore() == 2
    found = told.metrics
    assert found["recckpt.restore.fallbacks"] == {(): 1}
    written = datetime.fromisoformat(older.time.replace("Z", "+00:00")).timestamp()
    assert found["recckpt.last_save.time"] == {(): written}, "before the first save"


def test_requests_that_were_tried_again_are_counted_when_the_save_ends(memory_url, told, monkeypatch):
    saver = saver_of(memory_url)
    saver.storage.policy = replace(saver.storage.policy, sleep=lambda seconds: None)
    pipe, broken = type(saver.storage._fs).pipe_file, [ConnectionResetError(), TimeoutError()]

    def failing_twice(fs, path, *args, **kwargs):
        if broken and path.endswith(".arrow"):
            raise broken.pop()
        return pipe(fs, path, *args, **kwargs)

    monkeypatch.setattr(type(saver.storage._fs), "pipe_file", failing_twice)
    saver.save("a")
    assert told.metrics["recckpt.storage.retries"] == {(): 2}
    assert "recckpt.storage.free" not in told.metrics, "nobody knows it there"


def test_what_fails_in_opentelemetry_is_logged_once_and_fails_no_save(tmp_path, told, monkeypatch, caplog):
    class Broken(SpanProcessor):
        def on_start(self, *_, **__):
            raise ValueError("broken on start")

        def on_end(self, *_):
            raise ValueError("broken on end")

    told.tracers.add_span_processor(Broken())
    saver = saver_of(tmp_path)
    saver.save("a")
    saver.save("b")
    saver.load()
    assert caplog.text.count("saves and loads continue without it") == 1
    assert told.metrics["recckpt.saves"] == {("full", "ok"): 2}
    monkeypatch.setattr(metrics, "get_meter", failing)
    telemetry._tools.cache_clear()
    saver.save("c")
    saver.save("d")
    assert caplog.text.count("saves and loads continue without it") == 2, "it is another error"


def test_without_opentelemetry_nothing_is_told_and_nothing_is_missing(tmp_path, told, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    telemetry._tools.cache_clear()
    saver = saver_of(tmp_path)
    saver.save("a")
    saver.load()
    assert told.spans == []


def test_of_real_ranks_the_first_tells_for_all(tmp_path):
    run_script(Path(__file__).with_name("telemetry_ranks.py"), tmp_path, 2)
    [first, second] = results(tmp_path, 2)
    assert [span[:2] for span in first] == [
        ("recckpt.save", "UNSET"),
        ("recckpt.save", "ERROR"),
        ("recckpt.load", "UNSET"),
    ]
    assert first[0][2] == 100, "of all ranks"
    assert second == []


@pytest.mark.slow
def test_prometheus_reads_what_the_alerts_ask_for(tmp_path):
    small = ("--steps", 12, "--save-interval", 5, "--batch-size", 64, "--output-dir", tmp_path / "run")
    done = warm_python.run(ROOT / "examples/train_metrics.py", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    served = {line.partition("{")[0] for line in done.stdout.splitlines() if line.startswith("recckpt_")}
    assert "recckpt_save_bytes_total" in served
    asked = set(re.findall(r"\brecckpt_\w+(?=[ \[{)])", alert_rules())) - {"recckpt_run", "recckpt_expected"}
    assert len(asked) >= 9
    assert asked <= served | {"recckpt_failures_total", "recckpt_near_lag"}


def alert_rules():
    return re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/watch.md").read_text(encoding="utf-8"), re.DOTALL)[0]


@pytest.fixture
def promtool(tmp_path):
    """Try rules of alerts on the two jobs of tests/alerts, and return what promtool says."""
    if shutil.which("promtool") is None:
        pytest.skip("ALERTS WERE NOT TESTED: there is no promtool (apt-get install prometheus)")

    def run(rules, tests=None):
        tests = tests or (ROOT / "tests/alerts/two_jobs.yml").read_text(encoding="utf-8")
        (tmp_path / "rules.yml").write_text(rules, encoding="utf-8")
        (tmp_path / "tests.yml").write_text(tests, encoding="utf-8")
        return subprocess.run(
            ["promtool", "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.mark.slow
def test_the_alerts_name_the_job_that_died_and_the_one_whose_saves_fail(promtool):
    done = promtool(alert_rules())
    assert done.returncode == 0, done.stdout + done.stderr


ONE_OF_TWO_DIED = """
rule_files: [rules.yml]
evaluation_interval: 5m
tests:
  - interval: 1m
    input_series:
      - {{series: 'recckpt_last_save_time_seconds{{recckpt_run="{0}"}}', values: 0+60x180 _x360}}
      - {{series: 'recckpt_last_save_time_seconds{{recckpt_run="{1}", instance="b"}}', values: 0+60x540}}
    alert_rule_test:
      - {{eval_time: 4h, alertname: NoSave, exp_alerts: []}}
      - eval_time: 4h
        alertname: JobVanished
        exp_alerts:
          - exp_labels: {{recckpt_run: "{0}"}}
            exp_annotations: {{summary: "{0} has died or ended since yesterday"}}
"""


@pytest.mark.slow
def test_of_two_output_dirs_that_end_in_one_name_the_alerts_name_the_one_that_died(tmp_path, told, promtool):
    runs = (saved_to_two_of_one_name(tmp_path, told) * 2)[:2]  # where both have one, it is that of both
    done = promtool(alert_rules(), ONE_OF_TWO_DIED.format(*runs))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["unless on (recckpt_run)", "max by (recckpt_run)", "recckpt_run: clicks"])
def test_alerts_that_do_not_go_by_the_run_are_found_out(promtool, rule):
    broken = {"unless on (recckpt_run)": "unless on ()", "max by (recckpt_run)": "max", "recckpt_run: clicks": "of: x"}
    assert promtool(alert_rules().replace(rule, broken[rule])).returncode == 1
