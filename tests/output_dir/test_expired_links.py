"""Which links go and which are kept for others: rotation against the model of the protocol, without a disk."""

from faults.delta_protocol_model import Habits, TrainerTurn
from faults.delta_states import Reader, Rules, State, Trainer
from hypothesis import strategies as st
from support.drawn import drawn
from support.links import as_in_the_model, attempt_of, compacted, delta, full, output_dirs

from recckpt.errors import CorruptCheckpointError
from recckpt.format.manifest import Manifest
from recckpt.output_dir import rotation
from recckpt.output_dir.listing import Chains, Checkpoint, Listing, chained
from recckpt.policies.keep import EveryNth, Newest


def listing_of(there: dict[str, Manifest], damaged: set[str] = frozenset()) -> Listing:
    """Return the listing of an output dir where some are damaged, as of a missing file."""
    error = CorruptCheckpointError("x", "", found="no such file", expected="one")
    found = [Checkpoint(name, record) for name, record in there.items()]
    committed, chains = chained(found, dict.fromkeys(damaged, error))
    return Listing(committed, chains.broken, {}, lost=tuple(c for c in found if c.directory in chains.broken))


def made_of(*records: Manifest) -> Listing:
    return listing_of({attempt_of(record): record for record in records})


def victims(listing: Listing, keep, pinned=(), base=None) -> list[str]:
    return [c.directory for c in rotation.expired(listing, keep, pinned, base)]


A = full("a", 1)
B = delta("b", 2, A)
C = delta("c", 3, B)
F = compacted(B, "f" * 32)
X = full("x", 4)


def test_the_links_of_what_is_kept_stay_and_do_not_count():
    assert victims(made_of(A, B, C), 1) == []
    assert victims(made_of(A, B, C, X), 1) == ["c.4", "b.3", "a.2"]
    assert victims(made_of(A, B, C, X), 2) == []
    assert victims(made_of(A, B, C, X), 1, pinned={"b"}) == ["c.4"]
    assert victims(made_of(A, B, C, X), EveryNth(7)) == ["c.4", "b.3", "a.2"]


def test_the_base_of_the_writer_stays_with_its_links():
    assert victims(made_of(A, B, C, X), 1, base=B.save_id) == ["c.4"]
    assert victims(made_of(A, B, F, C, X), 1, base=B.save_id) == ["b.3", "a.2", "c.4"]


def test_what_is_superseded_goes_and_the_pin_holds_what_supersedes_it():
    form_dir = attempt_of(F)
    assert victims(made_of(A, B, F, C), 1) == ["b.3", "a.2"]
    assert victims(made_of(A, B, F, C), None) == ["b.3"]
    assert victims(made_of(A, B, F, C, X), 1, pinned={"b"}) == ["b.3", "a.2", "c.4"]
    assert victims(made_of(A, B, F, C, X), 1) == ["b.3", "a.2", "c.4", form_dir]


def test_a_damaged_form_goes_first_where_its_delta_is_whole_and_stays_where_it_is_all_there_is():
    form_dir = attempt_of(F)
    there = {attempt_of(record): record for record in (A, B, F, C, X)}
    assert victims(listing_of(there, {form_dir}), 1) == [form_dir, "c.4", "b.3", "a.2"]
    assert victims(listing_of(there, {form_dir}), None) == [form_dir]
    del there["b.3"]
    assert victims(listing_of(there, {form_dir}), 1) == ["a.2"]


def test_a_damaged_delta_goes_where_a_form_stands_for_it_and_no_other_damaged_one_does():
    there = {attempt_of(record): record for record in (A, B, F, C, X)}
    assert victims(listing_of(there, {"b.3"}), None) == ["b.3"]
    assert victims(listing_of(there, {"x.5"}), 9) == ["b.3"]
    assert victims(listing_of({"a": A, "mine": A, "x": X}, {"a"}), 1) == []


def test_where_two_are_wanted_the_newest_that_does_not_stand_on_the_newest_full_one_stays_too():
    y, z = delta("y", 5, X), delta("z", 6, delta("y", 5, X))
    assert victims(made_of(A, B, C, X, y, z), 2) == []
    assert victims(made_of(A, B, C, X, y, z), 1) == ["c.4", "b.3", "a.2"]
    d = full("d", 3)
    assert victims(made_of(A, B, d, X, y, z), 2) == ["b.3", "a.2"]
    assert victims(made_of(A, B, d, X, y, z), Newest(1)) == ["b.3", "a.2", "d.4"]
    assert victims(made_of(*(full(i, n, step=n) for n, i in enumerate("abcd"))), EveryNth(2)) == ["b.2"]


def test_the_links_of_a_copy_that_a_person_made_stay_with_it():
    there = {"a": A, "b": B, "mine": B, "x": X}
    assert victims(listing_of(there), 1) == ["b"]


def test_of_superseded_ones_those_go_first_on_which_nothing_stands():
    again = delta("a", 3, B, save_id="again")
    assert victims(made_of(A, B, again, X), 1) == ["a.4", "b.3", "a.2"]
    assert victims(made_of(A, full("b", 2), again, X), 1)[0] == "a.2"


def test_what_was_overwritten_twice_does_not_come_back_wherever_a_crash_cuts_its_removal_short():
    second = delta("b", 3, B, save_id="second")
    third = full("b", 4, save_id="third")
    listing = made_of(A, B, second, third, X)
    gone = rotation.in_order([c for c in listing.committed if c.ckpt_id == "b"], listing)
    assert [c.manifest.save_id for c in gone] == ["second", B.save_id, "third"]


@drawn(output_dirs(), st.sampled_from([1, 2, None]), st.data(), few=100, many=5000)
def test_the_victims_are_those_of_the_model_in_its_order(made, keep, data):
    there, damaged = with_chains(*made)
    if not there:
        return
    listing = listing_of(dict(sorted(there.items(), key=lambda item: item[1].save_id)), damaged)
    wholes = sorted({c.manifest.name for c in listing.committed})
    base = data.draw(st.sampled_from([*wholes, ""])) if wholes else ""
    found, offers = as_in_the_model(there, damaged)
    trainer = Trainer("rotate", base=base, ckpt_id="run")
    state = State(1, (0, frozenset()), found, offers, (trainer,), (), Reader(""), (0, 0), 0, 0, 0, 0)
    expected, _ = TrainerTurn(Rules(), Habits(keep=keep), state, 0)._victims()
    ours = victims(listing, keep, (), base or None)
    if keep == 2:  # the model does not keep what one flipped bit would not take
        assert [name for name in expected if name in ours] == ours
    else:
        assert ours == list(expected)


@drawn(
    output_dirs() | output_dirs(ids="abc"),
    st.sampled_from([1, 2, 3, None, EveryNth(2)]),
    st.sets(st.sampled_from(["a", "c0", "c1"]), max_size=1),
    st.data(),
    few=100,
    many=5000,
)
def test_whatever_goes_nothing_that_is_left_loses_a_link(made, keep, pinned, data):
    there, damaged = with_chains(*made)
    listing = listing_of(there, damaged)
    wholes = sorted({c.manifest.name for c in listing.committed})
    base = data.draw(st.none() | st.sampled_from(wholes)) if wholes else None
    gone = victims(listing, keep, pinned, base)
    kept = {c.manifest.name for c in listing.current if c is listing.current[-1] or c.ckpt_id in pinned} | {base}
    for done in range(len(gone) + 1):
        left = listing_of({name: record for name, record in there.items() if name not in gone[:done]}, damaged)
        assert left.damaged.keys() <= damaged
        assert all(left.named(origin) for origin in kept - {None})
        if len({record.ckpt_id for record in there.values()}) == len({record.name for record in there.values()}):
            assert victims(left, keep, pinned, base) == gone[done:]


def with_chains(there: dict[str, Manifest], damaged: set[str]) -> tuple[dict[str, Manifest], set[str]]:
    """Return an output dir without what has no chain, nor damaged forms of such: where nothing was lost, none has."""
    error = CorruptCheckpointError("x", "", found="no such file", expected="one")
    chains = Chains(there, dict.fromkeys(damaged, error))
    left = {
        name: record
        for name, record in there.items()
        if name not in chains.broken or (name in damaged and chains.named(record.name))
    }
    return left, damaged & left.keys()
