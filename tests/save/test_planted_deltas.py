"""Each rule of the base, left out of recckpt, is missed by a test."""

import pytest
from faults.plants import Plant
from save import test_delta_base, test_deltas
from support.spec_reader import DamagedError
from support.sweeps import mostly_slow

BEGIN, COMMIT = "recckpt.output_dir.commit:begin", "recckpt.output_dir.commit:commit"
CONFIRM, SAVE = "recckpt.save.deltas:Changes.confirm", "recckpt.save.save:write_and_commit"
IS_NEWEST = Plant(CONFIRM, "base.place != fence.newest_at_takeover or ", "")
MISSED = {
    test_delta_base.test_what_another_writer_has_gone_on_from_is_no_base: IS_NEWEST,
    test_delta_base.test_what_is_older_than_a_damaged_checkpoint_is_no_base: IS_NEWEST,
    test_delta_base.test_the_base_of_a_restored_run_is_durable_before_anything_stands_on_it: Plant(
        "recckpt.output_dir.fence:make_durable",
        "storage.sync_dir(layout.join(checkpoint.directory, subdirectory))",
        "pass",
    ),
    test_deltas.test_nothing_stands_on_an_ephemeral_delta: Plant(SAVE, " and not record.ephemeral", ""),
    test_deltas.test_a_failed_save_keeps_what_has_changed_for_the_next: Plant(
        "recckpt.sparse.table.marks:Frozen.failed", "end(self, None)", "end(self, self.base)"
    ),
    test_deltas.test_where_asking_costs_a_request_the_save_fails_and_the_next_is_full: Plant(
        BEGIN, "_check_base(storage, listing, base)", "pass"
    ),
    test_deltas.test_what_goes_while_a_delta_is_written_is_seen_before_it_is_committed: Plant(
        COMMIT, "_check_base(storage, fence.listing, record.parent.save_id)", "pass"
    ),
}


@mostly_slow()
@pytest.mark.parametrize(("test", "bug"), MISSED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_that_is_left_out_is_missed(tmp_path, monkeypatch, test, bug):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bug.function, "__code__", bug.code)
        given = {"tmp_path": tmp_path, "monkeypatch": monkeypatch, "training": test_deltas.Training(tmp_path)}
        names = test.__code__.co_varnames[: test.__code__.co_argcount]
        with pytest.raises((AssertionError, pytest.fail.Exception, DamagedError)):
            test(**{name: given[name] for name in names})
