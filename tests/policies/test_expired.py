"""Which checkpoints go: the choice of rotation against a model that looks at them one by one, without a disk."""

from dataclasses import replace
from datetime import datetime, timezone

from hypothesis import given
from hypothesis import strategies as st
from support.drawn import drawn

from recckpt.format.manifest import Manifest
from recckpt.output_dir import rotation
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.policies.keep import All, Best, EveryNth, KeptByAny, Newest, YoungerThan

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=timezone.utc)


def manifest_of(ckpt_id: str, seq: int, time: str = "", **content) -> Manifest:
    return Manifest((), (), (), ckpt_id=ckpt_id, save_id="", seq=seq, time=time, **content)


def listing_of(*ids: str, ephemeral: tuple[int, ...] = ()) -> Listing:
    """A listing of ids in order of commit; ``ephemeral`` are positions."""
    manifests = [manifest_of(ckpt_id, n, ephemeral=n in ephemeral) for n, ckpt_id in enumerate(ids)]
    return listing_with(manifests)


def listing_with(manifests: list[Manifest]) -> Listing:
    made = (replace(manifest, save_id=f"{n}", seq=n) for n, manifest in enumerate(manifests))
    return Listing(tuple(Checkpoint(f"{record.ckpt_id}.{record.seq + 1}", record) for record in made), {}, {})


def in_order(listing: Listing, keep, pinned=()) -> list[str]:
    return [checkpoint.manifest.save_id for checkpoint in rotation.expired(listing, keep, pinned, None, now=NOW)]


def expired(listing: Listing, keep, pinned=()) -> list[str]:
    return sorted(in_order(listing, keep, pinned))


class Nothing:
    """A policy that wants none."""

    def kept(self, checkpoints, now):
        return set()


def wants(keep, place: int, regular: list[Manifest]) -> bool:
    """Say what the words of a policy come to for one checkpoint, looking at the others one by one."""
    record = regular[place]
    if isinstance(keep, KeptByAny):
        return any(wants(part, place, regular) for part in keep.keeps)
    if isinstance(keep, All | None):
        return True
    if isinstance(keep, Newest | int):
        return len(regular[place + 1 :]) < (keep.n if isinstance(keep, Newest) else keep)
    if isinstance(keep, EveryNth):
        return record.step is not None and record.step % keep.n == 0
    if isinstance(keep, YoungerThan):
        return not record.time or record.time > f"2026-11-20T11:59:{60 - keep.seconds}Z"
    if isinstance(keep, Best):
        rivals = [(other.state.get(keep.metric), age) for age, other in enumerate(regular)]
        rivals = [(value if keep.mode == "max" else -value, age) for value, age in rivals if type(value) is int]
        mine = [rival for rival in rivals if rival[1] == place]
        return bool(mine) and sum(rival > mine[0] for rival in rivals) < keep.k
    raise TypeError(keep)


def stays(manifests: list[Manifest], number: int, keep, pinned) -> bool:
    """Say the same for rotation as a whole."""
    record = manifests[number]
    if any(later.ckpt_id == record.ckpt_id for later in manifests[number + 1 :]):
        return False
    if number == len(manifests) - 1 or record.ckpt_id in pinned:
        return True
    if record.ephemeral:
        return False
    current = [one for n, one in enumerate(manifests) if all(one.ckpt_id != two.ckpt_id for two in manifests[n + 1 :])]
    regular = [one for one in current if not one.ephemeral]
    return wants(keep, regular.index(record), regular)


MANIFESTS = st.lists(
    st.builds(
        Manifest,
        ckpt_id=st.sampled_from("abcdefgh"),
        save_id=st.just(""),
        seq=st.just(0),
        time=st.just("") | st.integers(50, 59).map("2026-11-20T11:59:{}Z".format),
        shards=st.just(()),
        tables=st.just(()),
        files=st.just(()),
        step=st.none() | st.integers(0, 6),
        state=st.fixed_dictionaries({}, optional={"auc": st.integers(0, 3) | st.sampled_from(["nan", None, True])}),
        ephemeral=st.sampled_from([False, False, True]),
    ),
    max_size=10,
)
KEEPS = st.one_of(
    st.integers(1, 4),
    st.none(),
    st.recursive(
        st.one_of(
            st.builds(Newest, st.integers(1, 4)),
            st.builds(EveryNth, st.integers(1, 4)),
            st.builds(YoungerThan, st.integers(1, 9)),
            st.builds(Best, st.integers(1, 3), st.just("auc"), st.sampled_from(["max", "min"])),
        ),
        lambda parts: st.lists(parts, min_size=1, max_size=3).map(lambda some: KeptByAny(*some)),
        max_leaves=3,
    ),
)
PINNED = st.sets(st.sampled_from("abcdefgh"), max_size=2)


def test_all_but_the_newest_and_pinned_expire_and_what_is_superseded_whatever_is_kept():
    assert [expired(listing_of("a", "b", "c"), n) for n in (1, 2, 3, None)] == [["0", "1"], ["0"], [], []]
    assert expired(listing_of(), 1) == []
    assert expired(listing_of("a", "b", "a"), None) == ["0"]
    assert expired(listing_of("a", "a", "a"), 5) == ["0", "1"]
    assert expired(listing_of("a", "b", "c", "d"), 2, pinned={"a"}) == ["1"]
    assert expired(listing_of("a", "b"), 1, pinned={"a", "b"}) == []
    assert expired(listing_of("a", "a"), 1, pinned={"a"}) == ["0"]


@given(st.lists(st.sampled_from("abcd"), max_size=9), st.integers(1, 4))
def test_the_newest_is_never_a_victim_and_no_more_than_max_keep_stay(ids, max_keep):
    victims = expired(listing_of(*ids), max_keep)
    assert len(ids) - len(victims) == min(max_keep, len(set(ids)))
    assert str(len(ids) - 1) not in victims


def test_the_newest_stays_where_the_policy_wants_none():
    assert expired(listing_of("a", "b", "c"), Nothing()) == ["0", "1"]
    assert expired(listing_of("a"), Nothing()) == []
    assert expired(listing_of("a", "b", "c"), Nothing(), pinned={"a"}) == ["1"]
    assert expired(listing_of("a", "b", "c"), Nothing(), pinned={"b"}) == ["0"]


def test_an_ephemeral_checkpoint_stays_until_the_next_commit_of_any_kind_and_never_counts_with_others():
    assert expired(listing_of("a", "b", ephemeral=(1,)), 1) == []
    assert expired(listing_of("a", "b", "c", ephemeral=(1, 2)), 1) == ["1"]
    assert expired(listing_of("a", "b", "c", ephemeral=(1,)), 9) == ["1"]
    assert expired(listing_of("a", "b", "c", ephemeral=(1,)), None) == ["1"]
    assert expired(listing_of("a", "b", ephemeral=(0, 1)), None) == ["0"]
    assert expired(listing_of("a", "b", "c", "d", "e", ephemeral=(2, 3, 4)), 2) == ["2", "3"]


def test_a_pinned_ephemeral_checkpoint_stays_and_no_policy_sees_it():
    seen = []

    class Watching(Nothing):
        def kept(self, checkpoints, now):
            seen.extend(checkpoint.ckpt_id for checkpoint in checkpoints)
            return {"c"}  # which is ephemeral

    listing = listing_of("a", "b", "c", "d", ephemeral=(1, 2))
    assert expired(listing, Watching(), pinned={"b"}) == ["0", "2"]
    assert expired(listing, Nothing(), pinned={"b", "c"}) == ["0"]
    assert seen == ["a", "d"]


def test_a_policy_judges_the_newest_of_each_id_and_what_that_superseded_goes_first():
    values = zip("abac", [9, 5, 1, 1], strict=True)
    manifests = [manifest_of(i, n, state={"auc": auc}) for n, (i, auc) in enumerate(values)]
    assert expired(listing_with(manifests), Best(1, "auc")) == ["0", "2"]
    assert in_order(listing_of("b", "a", "c", "a", "d"), 1) == ["1", "0", "2", "3"]


def test_the_age_is_that_of_now():
    old, young = (manifest_of(i, n, time=f"20{n}6-11-20T12:00:00Z") for n, i in ((0, "old"), (9, "young")))
    last = manifest_of("last", 10)
    victims = rotation.expired(listing_with([old, young, last]), YoungerThan(60), (), None)
    assert [victim.ckpt_id for victim in victims] == ["old"]
    late = datetime(2097, 1, 1, tzinfo=timezone.utc)
    assert len(rotation.expired(listing_with([old, young, last]), YoungerThan(60), (), None, now=late)) == 2


@drawn(MANIFESTS, KEEPS, PINNED, few=60, many=2000)
def test_rotation_does_what_the_words_of_its_policy_say(manifests, keep, pinned):
    victims = [str(n) for n in range(len(manifests)) if not stays(manifests, n, keep, pinned)]
    assert expired(listing_with(manifests), keep, pinned) == victims


@given(MANIFESTS, KEEPS, PINNED)
def test_a_rotation_that_is_cut_short_is_finished_by_the_next(manifests, keep, pinned):
    listing = listing_with(manifests)
    victims = in_order(listing, keep, pinned)
    for done in range(len(victims) + 1):
        left = tuple(c for c in listing.committed if c.manifest.save_id not in victims[:done])
        assert in_order(Listing(left, {}, {}), keep, pinned) == victims[done:]
