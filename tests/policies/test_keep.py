"""What to keep: each object chooses among manifests, without a disk or a clock."""

import pickle
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recckpt import Saver
from recckpt.format.manifest import FileEntry, Link, Manifest
from recckpt.policies.keep import All, Best, EveryNth, Keep, KeepBytes, KeptByAny, Newest, OnePer, YoungerThan, as_keep

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=timezone.utc)
SCALARS = st.integers(-2, 2) | st.floats() | st.booleans() | st.none() | st.sampled_from(["nan", "NaN", "1"])


def one(ckpt_id: str, step: int | None = None, time: str = "", **state) -> Manifest:
    return Manifest((), (), (), ckpt_id=ckpt_id, save_id="", seq=0, time=time, step=step, state=state)


def kept(keep: Keep, checkpoints: list[Manifest], now: datetime = NOW) -> str:
    """The ids that are kept, in order."""
    return "".join(sorted(keep.kept(checkpoints, now)))


def of_steps(*steps: int | None) -> list[Manifest]:
    return [one("abcdefghi"[place], step) for place, step in enumerate(steps)]


def of_auc(*values: object) -> list[Manifest]:
    return [one("abcdefghi"[place], auc=value) for place, value in enumerate(values)]


def of_sizes(*sizes: int, on: dict[str, str] | None = None) -> list[Manifest]:
    """Checkpoints a, b, ... of so many bytes; ``on`` says what a delta stands on, the parent first."""
    found = [one("abcdefghi"[place]) for place in range(len(sizes))]
    links = {name: tuple(Link(below, below, below) for below in links) for name, links in (on or {}).items()}
    return [
        replace(each, save_id=each.ckpt_id, files=(FileEntry("x", size, 0),), chain=links.get(each.ckpt_id, ()))
        for each, size in zip(found, sizes, strict=True)
    ]


def test_the_newest_that_fit_into_the_bytes_stay_with_what_deltas_stand_on_and_the_newest_in_any_case():
    sizes = {1: "d", 30: "d", 49: "d", 50: "cd", 59: "cd", 60: "bcd", "0.1 kB": "abcd"}
    assert {n_bytes: kept(KeepBytes(n_bytes), of_sizes(40, 10, 20, 30)) for n_bytes in sizes} == sizes
    assert kept(KeepBytes(1), []) == ""
    chain = of_sizes(100, 100, 3, 1, on={"c": "b", "d": "cb"})
    sizes = {1: "d", 103: "d", 104: "bcd", 203: "bcd", 204: "abcd"}
    assert {n_bytes: kept(KeepBytes(n_bytes), chain) for n_bytes in sizes} == sizes


def test_the_newest_are_the_last_to_be_committed_whatever_their_step_and_every_nth_goes_by_that():
    checkpoints = of_steps(300, 100, None, 200)
    assert [kept(Newest(n), checkpoints) for n in (1, 2, 3, 4, 5)] == ["d", "cd", "bcd", "abcd", "abcd"]
    assert kept(EveryNth(100), of_steps(0, 50, 100, 150, None, 200, 1000)) == "acfg"
    assert kept(EveryNth(1), of_steps(0, 7, None)) == "ab"
    assert kept(All(), of_steps(1, None, 3)) == "abc"
    assert [as_keep(given) for given in (3, None, EveryNth(3))] == [Newest(3), All(), EveryNth(3)]
    for keep in (All(), Newest(1), EveryNth(1), Best(1, "auc"), YoungerThan(1), All() | Newest(1)):
        assert keep.kept([], NOW) == set()


def test_the_best_are_the_greatest_or_the_least_of_a_metric_and_of_equally_good_ones_the_newer():
    checkpoints = of_auc(0.5, 0.9, 0.7, 0.8)
    assert [kept(Best(k, "auc"), checkpoints) for k in (1, 2, 3, 9)] == ["b", "bd", "bcd", "abcd"]
    assert [kept(Best(k, "auc", "min"), checkpoints) for k in (1, 2, 3, 9)] == ["a", "ac", "acd", "abcd"]
    for mode in ("max", "min"):
        assert kept(Best(1, "auc", mode), of_auc(0.5, 0.5, 0.5)) == "c"
        assert kept(Best(2, "auc", mode), of_auc(1, 1.0, 1)) == "bc"
    assert kept(Best(9, "auc"), [one("a", loss=1.0), one("b", auc=1.0), one("c")]) == "b"
    assert kept(Best(1, "auc"), of_auc(10**400, 1e300, 10**400 - 1)) == "a"  # of any size
    assert kept(Best(1, "auc", "min"), of_auc(-(10**400), -1e300, 1 - 10**400)) == "a"


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "nan", "NaN", "9", True, False, None])
def test_what_is_no_finite_number_is_never_best(mode, value):
    assert kept(Best(3, "auc", mode), of_auc(value, 0.5, value)) == "b"
    assert kept(Best(3, "auc", mode), of_auc(value)) == ""


def test_a_saver_says_so_once_where_no_checkpoint_that_goes_or_stays_has_the_metric(tmp_path, caplog):
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path), max_keep=Newest(1) | Best(1, "acu"))
    for step in range(4):
        saver.save(f"ckpt_{step}", state={"auc": 0.5})
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    text = (
        "max_keep: Best(k=1, metric='acu', mode='max') keeps nothing: no checkpoint has the metric 'acu', found ['auc']"
    )
    assert said == [f"{tmp_path}: {text}"]


@given(st.lists(SCALARS, max_size=9), st.integers(1, 4), st.sampled_from(["max", "min"]))
def test_nothing_that_is_left_out_is_better_than_what_is_best(values, k, mode):
    checkpoints = of_auc(*values)
    best = kept(Best(k, "auc", mode), checkpoints)
    able = {c.ckpt_id: c.state["auc"] for c in checkpoints if type(c.state["auc"]) in (int, float)}
    able = {ckpt_id: value for ckpt_id, value in able.items() if value - value == 0}
    assert len(best) == min(k, len(able))
    assert set(best) <= set(able)
    for chosen in best:
        for left in set(able) - set(best):
            difference = able[chosen] - able[left] if mode == "max" else able[left] - able[chosen]
            assert difference > 0 or (difference == 0 and chosen > left)


def test_the_young_are_those_written_less_than_so_long_ago_in_any_zone_or_at_a_time_that_cannot_be_read():
    checkpoints = [one("abcd"[age], time=f"2026-11-20T11:59:{59 - age}Z") for age in range(4)]  # 1, 2, 3, 4 s old
    assert [kept(YoungerThan(seconds), checkpoints) for seconds in (3, 3.5, 1)] == ["ab", "abc", ""]
    elsewhere = [one("a", time="2026-11-20T14:00:00+02:00"), one("b", time="2026-11-20T12:00:00+02:00")]
    assert kept(YoungerThan(60), elsewhere) == "a"
    assert kept(YoungerThan(60), elsewhere, NOW.astimezone(timezone(timedelta(hours=9)))) == "a"
    unread = ["", "yesterday", "2026", "2020-01-01", "2020-01-01T00:00:00", "2020-13-01T00:00:00Z"]
    for time in ("2027-01-01T00:00:00Z", *unread):  # of a clock that runs ahead, and such as cannot be read
        assert kept(YoungerThan(1), [one("a", time=time), one("b", time="2020-01-01T00:00:00Z")]) == "a"


def at_hours(*hours: float) -> list[Manifest]:
    start = datetime(2026, 11, 20, tzinfo=timezone.utc)
    times = [(start + timedelta(hours=hour)).isoformat(timespec="seconds").replace("+00:00", "Z") for hour in hours]
    return [one("abcdefghi"[place], time=time) for place, time in enumerate(times)]


def test_the_first_of_each_interval_stays_whatever_comes_later():
    checkpoints = at_hours(0.2, 0.9, 1.0, 2.5, 2.6, 4.1)
    assert kept(OnePer(3600), checkpoints) == "acdf"
    assert kept(OnePer(86400), checkpoints) == "a"
    assert kept(OnePer(2.5 * 3600) | Newest(1), checkpoints[:5]) == "ade"
    assert kept(OnePer(3600), [one("a", time="yesterday"), *at_hours(0, 0)[1:], one("c", time="")]) == "abc"


@given(st.lists(st.floats(0, 100), max_size=9).map(sorted), st.floats(0.1, 30))
def test_one_per_interval_is_what_remains_of_a_run_that_rotates_after_each_save(hours, interval):
    keep, there = OnePer(3600 * interval), []
    for checkpoint in at_hours(*hours):
        there = [each for each in [*there, checkpoint] if each.ckpt_id in keep.kept([*there, checkpoint], NOW)]
    assert "".join(each.ckpt_id for each in there) == kept(keep, at_hours(*hours))


def test_several_metrics_count_by_their_weighted_sum_where_a_checkpoint_has_them_all():
    values = [(0.70, 0.5), (0.72, 0.9), (0.71, 0.5), (0.9, None), (float("nan"), 0.1)]
    checkpoints = [one("abcde"[place], auc=auc, loss=loss) for place, (auc, loss) in enumerate(values)]
    assert kept(Best(1, {"auc": 1, "loss": -0.1}), checkpoints) == "c"
    assert kept(Best(1, {"auc": 1, "loss": -0.01}), checkpoints) == "b"
    assert kept(Best(2, {"auc": -1, "loss": 0.1}, "min"), checkpoints) == "ac"


def test_joined_policies_keep_what_any_of_them_keeps_and_each_sees_all():
    checkpoints = [one("abcdef"[place], step=100 * place, auc=auc) for place, auc in enumerate([3, 9, 5, 7, 1, 2])]
    assert kept(Newest(2), checkpoints) == "ef"
    assert kept(Best(2, "auc"), checkpoints) == "bd"
    assert kept(Newest(2) | Best(2, "auc"), checkpoints) == "bdef"
    assert kept(Newest(2) | Best(2, "auc") | EveryNth(200), checkpoints) == "abcdef"


def test_joining_is_flat_and_takes_objects_that_are_not_ours():
    class First:
        def kept(self, checkpoints, now):
            return {checkpoints[0].ckpt_id}

    first, newest, nth = First(), Newest(1), EveryNth(5)
    assert (newest | first | nth).keeps == (newest, first, nth)
    assert (first | (newest | nth)).keeps == (first, newest, nth)
    assert kept(first | newest, of_steps(1, 2, 3)) == "ac"
    assert as_keep(first) is first


def test_they_print_compare_and_pickle_as_they_were_made():
    keep = Newest(3) | EveryNth(1000) | Best(2, "auc", "min") | YoungerThan(60) | All()
    assert isinstance(keep, KeptByAny)
    assert repr(keep) == (
        "KeptByAny(Newest(n=3), EveryNth(n=1000), Best(k=2, metric='auc', mode='min'), YoungerThan(seconds=60), All())"
    )
    weighted = OnePer(60) | Best(2, {"auc": 1, "loss": -0.1})
    assert pickle.loads(pickle.dumps(weighted)) == weighted == eval(repr(weighted))
    assert len({weighted, eval(repr(weighted))}) == 1
    assert pickle.loads(pickle.dumps(keep)) == keep == eval(repr(keep))
    assert len({keep, eval(repr(keep))}) == 1
