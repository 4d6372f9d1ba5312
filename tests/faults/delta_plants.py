"""The rules of the models of deltas, each as a bug in the code that keeps to it; or why the code has none to plant.

A tuple where several places in the code see to one rule, each of which would do.
"""

from faults.plant import Plant

MARKS, OFFERS, ROTATION = "recckpt.sparse.table.marks", "recckpt.output_dir.offers", "recckpt.output_dir.rotation"
SAVE, STORE = "recckpt.save", "recckpt.sparse.table.row_store:RowStore"
OBSERVERS = "recckpt.sparse.table.observers:Observers"
NO_MARKS = "(MarkSet(is_replaced=False),)"
COMMITTED = "        if to.changes is not None and not record.ephemeral:\n            staged.committed(record.save_id)"
OWN_NAME = "save_id = secrets.token_hex(16)"

# of the protocol
OF_CHAINS = {
    "base_is_newest_at_takeover": Plant(
        f"{SAVE}.delta_base:Changes.confirm", "base.place != fence.newest_at_takeover or not links", "not links"
    ),
    "parent_is_origin": Plant(
        f"{SAVE}.commit:standing_on",
        "Link(link.ckpt_id, link.manifest.origin, link.directory)",
        "Link(link.ckpt_id, link.manifest.save_id, link.directory)",
    ),
    "sync_base": Plant(f"{SAVE}.delta_base:Changes.confirm", "_sync(storage, link)", "pass"),
    "ephemeral_keeps_base": Plant(
        f"{SAVE}.save:write_and_commit", "to.changes is not None and not record.ephemeral", "to.changes is not None"
    ),
    "failed_keeps_marks": Plant(
        f"{MARKS}:Frozen.failed", "self._marks.end(self, None)", "self._marks.end(self, self._base)"
    ),
    "closure": Plant(
        "recckpt.output_dir.chains:Chains.closure", "for link in self.links(directory)", "for link in (directory,)"
    ),
    "keep_own_base": Plant(f"{ROTATION}:expired", "*([base] if base else [])", "*[]"),
    "dependents_first": Plant(
        f"{ROTATION}:in_order",
        'c.manifest.kind == "delta"), reverse=True)',
        'c.manifest.kind == "delta"), reverse=False)',
    ),
    "check_before_removal": Plant(
        "recckpt.output_dir.fence:Fence.remove",
        "        self.check()\n        if rotation.remove(",
        "        if rotation.remove(",
    ),
    "sync_form_before_drop": Plant(f"{ROTATION}:sync_forms", "if forms and gone else []", "if False else []"),
    "delta_before_its_forms": Plant(
        f"{ROTATION}:in_order", 'c.manifest.kind == "delta"), reverse', 'c.manifest.kind == "full"), reverse'
    ),
    "unique_names": Plant("recckpt.checkpoint.attempt:_intent_of_offer", OWN_NAME, 'save_id = "0" * 32'),
    "synced_before_whole": Plant(  # what is in the files; their names are synced by the owner, too
        "recckpt.storage.local_files:LocalSink.close",
        "os.fsync(fd)",
        "None if '.' in self._path.parent.parent.name[1:] else os.fsync(fd)",
    ),
    "adopt_whole": (
        Plant(f"{OFFERS}:look_at", "next(file_problems(storage, directory, content), None)", "None"),
        Plant("recckpt.output_dir.commit:commit", "    check_files(storage, fence, directory, record, visible)\n", ""),
    ),
    "adopt_young": Plant(f"{OFFERS}:_reasons_against", "elif age_sec >= DAY_SEC:", "elif False:"),
    "adopt_what_counts": Plant(
        f"{OFFERS}:delta_of", "for c in listing.committed if", "for c in (*listing.committed, *listing.lost) if"
    ),
    "adoption_is_an_attempt": Plant(f"{OFFERS}:_form", "save_id=secrets.token_hex(16)", "save_id=offer.save_id"),
    "failed_adoption_removes_nothing": Plant(
        f"{OFFERS}:adopt",
        "        return None\n",
        "        rotation.remove_leftover(storage, candidate.directory, 1)\n        return None\n",
    ),
    "form_keeps_place": Plant(
        f"{OFFERS}:_form", "*delta.place, offer.save_id", "fence.epoch, fence.listing.next_seq, offer.save_id"
    ),
    "form_has_flags": Plant(f"{OFFERS}:_form", "**offer.content", "**{**offer.content, 'ephemeral': False}"),
    "whole_before_full": Plant(
        "recckpt.output_dir.chains:Chains._stand",
        "self._named.get(record.parent.save_id, ()):",
        "self._named.get(record.parent.save_id, ())[:1]:",
    ),
    "look_again": Plant(
        "recckpt.output_dir.listing:look_around", "if is_complete and (listing.committed", "if (listing.committed"
    ),
}

# of the marks
OF_MARKS = {
    "marks_kept_until_commit": Plant(
        f"{MARKS}:Marks.freeze",
        "self._since = _Since(base, (first, second))",
        "self._since = _Since(base, (MarkSet(is_replaced=False), second))",
    ),
    "second_set": Plant(f"{MARKS}:Marks.end", "_Since(base, sets[1:])", f"_Since(base, {NO_MARKS})"),
    "second_set_is_told": Plant(f"{OBSERVERS}.mark", "in self.mark_sets():", "in self.mark_sets()[:1]:"),
    "erase_moves_marks": Plant(
        "recckpt.sparse.table.mark_set:MarkSet.move",
        "_move_marks(erasure.movers, erasure.holes, self.bits, self._count)",
        "self.bits[erasure.holes >> 3] &= ~(1 << (erasure.holes & 7)).astype(np.uint8)",
    ),
    "erase_moves_second": Plant(
        f"{STORE}.erase",
        "marks.move(erasure)",
        "(marks.move(erasure) if marks is self._observers.mark_sets()[0] or marks.is_replaced\n"
        "                 else marks.bits.__setitem__(erasure.holes >> 3, 0))",
    ),
    "tombstones_kept_on_failure": Plant(
        f"{MARKS}:Marks.end",
        "self._since = _Since(before, sets[:1])",
        "self._since = [setattr(sets[0], 'erased', sets[1].erased), _Since(before, sets[:1])][1]",
    ),
    "tombstones_in_both": Plant(
        f"{STORE}.erase",
        "marks.erase(erasure.ids, erasure.rows, len(rows))",
        "marks.erase(*(erasure[1::-1] if marks is self._observers.mark_sets()[0] else (erasure.ids[:0],) * 2), "
        "len(rows))",
    ),
    "replaced_kept_on_failure": Plant(
        f"{MARKS}:Marks.end",
        "self._since = _Since(before, sets[:1])",
        "self._since = [setattr(sets[0], 'is_replaced', sets[1].is_replaced), _Since(before, sets[:1])][1]",
    ),
    "replaced_in_both": Plant(f"{OBSERVERS}.replaced", "in self.mark_sets():", "in self.mark_sets()[:1]:"),
    "present_are_not_deleted": Plant(f"{MARKS}:DeltaSource.deletes", "erased[upserts.find(erased) < 0]", "erased"),
    "new_slot_replaces": (
        Plant(f"{STORE}.add_column", "self._replaced()", "pass"),
        Plant(f"{SAVE}.full_or_delta:delta_proposal", " or base.slots.get(table.name) != slots", ""),
    ),
    "new_store_replaces": Plant(
        "recckpt.sparse.table.tracker:Tracker._of",
        "marks = self._marks[table.name] = _marks_of(table.store)",
        "before, marks = marks, _marks_of(table.store)\n"
        "        self._marks[table.name] = marks\n"
        "        marks.begin(before._since.base if before else '')",
    ),
    "replaced_is_agreed": Plant(
        f"{SAVE}.full_or_delta:agreed_kind",
        "compress(tables.names, tables.is_replaced)",
        "compress(first.tables.names, first.tables.is_replaced)",
    ),
    "ephemeral_keeps_marks": Plant(
        f"{SAVE}.save:write_and_commit",
        COMMITTED,
        "        if record.ephemeral and staged.kind.base:\n            staged.committed(staged.kind.base)\n"
        + COMMITTED,
    ),
    "marks_know_their_base": Plant(f"{MARKS}:Frozen.is_replaced", "self._base != base", "self._base is None"),
    "upserts_beat_deletes": Plant(
        "recckpt.sparse.files.link_pass:LinkPass.run",
        "    n_bytes += self._read_kind(",
        "    for table, fillers in self._fillers.items():\n"
        "        for filler in fillers:\n"
        "            filler.end_link(deletes.of(table))\n"
        "    n_bytes += self._read_kind(",
    ),
}

DELTA_PLANTS = {**OF_CHAINS, **OF_MARKS}

WITHOUT = {
    "objects": "no rule, but the kind of storage",
    "owner_adopts": "no function of a compactor commits in the output dir of the chain: there is nothing to change",
    "only_owner_removes": "no function of a compactor removes what others wrote: there is nothing to change",
}
