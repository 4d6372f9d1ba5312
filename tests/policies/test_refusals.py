"""What policies refuse: each argument that is none of what it can be, by a message that names it."""

import math

import pytest

from recckpt.policies.admit import Bloom, MinCount, Probability, as_admit
from recckpt.policies.deltas import MAX_DELTAS, Deltas, as_deltas
from recckpt.policies.evict import Capacity, EvictedByAll, LowCount, SmallNorm, Unseen, UnseenFor
from recckpt.policies.keep import Best, EveryNth, KeepBytes, KeptByAny, Newest, OnePer, YoungerThan, as_keep
from recckpt.policies.options import OnSignal, Tolerate, Transfers, as_tolerate
from recckpt.policies.when import (
    AnyOf,
    AtSteps,
    EveryEpochs,
    EveryEventTime,
    EverySeconds,
    EverySteps,
    EveryWindows,
    WhenTrue,
    as_when,
)

NO_COUNTS = [0, -1, 2.5, "3", True, None, math.nan]
NO_NUMBERS = [0, -1, "3", True, None, math.nan, math.inf, 10**400]
NO_BYTES = [0, -1, 2.5, True, None, "", "2", "2 XB", "-2 TB", "nan GB", "9e9 B", "90000000 TB", "9" * 400 + " B"]
NO_METRICS = ["", None, 3, {}, {"": 1}, {"auc": 0}, {"auc": "1"}, {"auc": True}, {"auc": math.nan}, {3: 1}]
COUNT, NUMBER = "n must be an int of at least 1, found", "must be a finite number above 0, found"
ROWS = [  # what is called, with each of which values, and what it says
    *((kind, NO_COUNTS, f"{kind.__name__}: {COUNT}") for kind in (EverySteps, EveryWindows, EveryEpochs)),
    *((kind, NO_NUMBERS, f"{kind.__name__}: seconds {NUMBER}") for kind in (EverySeconds, EveryEventTime)),
    (AtSteps, [[], (), 5, None, "3", [0], [3, -1], [2.5], ["3"], [True]], "AtSteps: .* must be "),
    (WhenTrue, [None, 3, "loss > 1"], "WhenTrue: predicate must be a callable"),
    (
        lambda whens: AnyOf(*whens),
        [(), (100,), (EverySteps(1), None), (EverySteps,), ([EverySteps(1)],)],
        r"AnyOf: expected one When or more, such as EverySteps\(100\), found",
    ),
    (as_when, [*NO_COUNTS, EverySteps, object()], "save_interval must be an int of at least 1.*or an object with due"),
    *((kind, NO_COUNTS, f"{kind.__name__}: {COUNT}") for kind in (Newest, EveryNth)),
    (lambda n: Best(n, "auc"), NO_COUNTS, "Best: k must be an int of at least 1, found"),
    (lambda metric: Best(1, metric), NO_METRICS, "Best: metric must be the name of a metric, or several names with"),
    (lambda mode: Best(1, "auc", mode), ["maximum", None, max, ""], "Best: mode must be 'max' or 'min', found"),
    *((kind, NO_NUMBERS, f"{kind.__name__}: seconds {NUMBER}") for kind in (YoungerThan, OnePer)),
    (KeepBytes, [*NO_BYTES, f"{1 << 63} B"], "KeepBytes: n_bytes must be a number of bytes of at least 1"),
    (
        lambda keeps: KeptByAny(*keeps),
        [(), (3,), (Newest(1), None), (Newest,), ([Newest(1)],)],
        r"KeptByAny: expected one Keep or more, such as Newest\(3\), found",
    ),
    (
        as_keep,
        [*(n for n in NO_COUNTS if n is not None), Newest, object()],
        "max_keep must be an int of at least 1, found .*; or None for all, or an",
    ),
    (lambda n: Unseen(steps=n), [*NO_COUNTS, 2**53 + 1], "Unseen: steps must be (an int of )?at (least|most)"),
    (LowCount, [*NO_COUNTS, 2**53 + 1], "LowCount: n must be (an int of )?at (least|most)"),
    (Capacity, [*NO_COUNTS, 2**53 + 1], "Capacity: n must be (an int of )?at (least|most)"),
    *((make, NO_NUMBERS, NUMBER) for make in (lambda n: UnseenFor(days=n), SmallNorm, lambda n: Capacity(10, room=n))),
    (lambda days: UnseenFor(days=days), [1e300], r"UnseenFor: days must be at most 104249991374, found 1e\+300"),
    (lambda by: Capacity(10, by=by), ["embedding", None, "", "step"], "Capacity: by must be 'last_step' or 'count', f"),
    (lambda room: Capacity(10, room=room), [0.6], r"room must be at most 0\.5, found 0\.6"),
    *(
        (join, [3, None, Unseen, Capacity(10), [LowCount(2)]], "expected policies that look at one row")
        for join in (lambda other: LowCount(2) & other, lambda other: EvictedByAll(LowCount(2), other))
    ),
    (MinCount, [0, 2.5, True], f"MinCount: {COUNT}"),
    (MinCount, [2**70], "MinCount: n must be at most 9007199254740992"),
    (lambda n: MinCount(n, bloom=Bloom(10, 0.01)), [256], "counts to 255"),
    (lambda bloom: MinCount(2, bloom=bloom), [10], "must be a Bloom"),
    (Probability, [0, -0.1, 1.5, math.nan, "0.1", True], "Probability: p must be"),
    (lambda of: Bloom(*of), [(0, 0.01), (1.5, 0.01), (10, 0), (10, 0.9), (10, 1e-9), (10, "x")], "Bloom: "),
    (lambda of: Bloom(*of), [(10**11, 0.1), (10**25, 0.5)], "Bloom: "),
    (lambda n: Deltas(full_every=n), NO_COUNTS, "Deltas: full_every must be an int of at least 1, found"),
    (lambda n: Deltas(full_every=n), [MAX_DELTAS + 1], "full_every must be at most 999, found 1000"),
    (lambda part: Deltas(max_chain_bytes=part), NO_NUMBERS, f"Deltas: max_chain_bytes {NUMBER}"),
    (lambda part: Deltas(max_dirty=part), NO_NUMBERS, f"Deltas: max_dirty {NUMBER}"),
    (lambda part: Deltas(max_dirty=part), [1.5], r"max_dirty must be at most 1, found 1\.5"),
    (lambda compact: Deltas(compact=compact), [None, 1, "yes"], "Deltas: compact must be True or False, found"),
    *(
        (make, NO_NUMBERS, f"{what} {NUMBER}")
        for make, what in (
            (lambda seconds: Transfers(timeout_sec=seconds), "Transfers: timeout_sec"),
            (lambda seconds: OnSignal((), seconds or 0), "OnSignal: grace_sec"),
        )
    ),
    (lambda sec: Transfers(visible_sec=sec), [-1, "3", True, None, math.nan, math.inf], "Transfers: visible_sec must"),
    (lambda n: Transfers(min_free_bytes=n), [-1, 2.5, True, None], "Transfers: min_free_bytes must be an int of at le"),
    (lambda n: Transfers(max_uploads=n or 0), NO_COUNTS, "Transfers: max_uploads must be an int of at least 1, found"),
    (lambda path: Transfers(work_dir=path), [5, "", "s3://bucket/work"], "Transfers: work_dir must be a path on this"),
    (lambda flag: Transfers(pre_download=flag), ["yes", 1, None], "Transfers: pre_download must be True or False, f"),
    (OnSignal, [2.5, True, "SIGTREM", ["SIG_IGN"], (None,)], "save_on_signal=.*; name signals that can be caught"),
    (Tolerate, NO_COUNTS, "Tolerate: raise_after must be an int of at least 1, found"),
    (lambda call: Tolerate(3, call), ["warn", 3], "Tolerate: call must be a callable"),
    (as_tolerate, ["ignore", None, 3], "on_save_error must be 'raise', 'warn', a callable"),
    (as_deltas, [None, 1, 20, "yes", Deltas], r"deltas must be True, False or Deltas\(\.\.\.\), found"),
]


@pytest.mark.parametrize(("call", "values", "text"), ROWS)
def test_what_a_policy_cannot_be_of_is_refused(call, values, text):
    for value in values:
        with pytest.raises(ValueError, match=text):
            call(value)


@pytest.mark.parametrize("wrong", [5, "MinCount", MinCount, [MinCount(5)]])
def test_what_admits_nothing_is_refused(wrong):
    with pytest.raises(TypeError, match="admit must be"):
        as_admit(wrong)
