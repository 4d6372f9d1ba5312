"""The bugs that can be planted, each in the source of one function of recckpt, by name."""

import __future__

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass

MARKS, OFFERS, ROTATION = "recckpt.sparse.table.marks", "recckpt.output_dir.offers", "recckpt.output_dir.rotation"
SAVE, STORE = "recckpt.save", "recckpt.sparse.table.row_store:RowStore"
OBSERVERS = "recckpt.sparse.table.store:Observers"
NO_MARKS = "(MarkSet(is_replaced=False),)"
COMMITTED = "        if to.changes is not None and not record.ephemeral:\n            staged.committed(record.save_id)"
OWN_NAME = "save_id = secrets.token_hex(16)"
WITHOUT = {
    "objects": "no rule, but the kind of storage",
    "owner_adopts": "no function of a compactor commits in the output dir of the chain: there is nothing to change",
    "only_owner_removes": "no function of a compactor removes what others wrote: there is nothing to change",
}
ANNOUNCER, RULES = "recckpt.live.torch_embedding:TorchAnnouncer", "recckpt.live.torch_rules"
PRINTS = "recckpt.sparse.table.prints"
OF_SLOTS = "for spec in rows.slots:"
OF_SUMS = "for spec in [spec for spec in rows.slots if spec.name.endswith('_sum')] or rows.slots:"
SYNC = "os.fsync(fd)"


@dataclass(frozen=True)
class Plant:
    """A bug.

    Attributes:
        where: the function that has it, as ``module:qualified.name``.
        old: a text that is in its source once.
        new: what the bug has in its place.
    """

    where: str
    old: str
    new: str

    @property
    def function(self):
        module, _, path = self.where.partition(":")
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return _plain(found)

    @property
    def code(self):
        """The code of the function with the bug."""
        function = self.function
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, (
            f"{self.where} has not this once, so the bug has to be planted anew: {self.old}"
        )
        names = dict(vars(sys.modules[function.__module__]))
        changed = source.replace(self.old, self.new)
        flags = __future__.annotations.compiler_flag
        exec(compile(changed, f"<planted in {self.where}>", "exec", flags, dont_inherit=True), names)
        made = names[function.__name__]
        return _plain(made).__code__


def _plain(found):
    """Return the function of a property or a class method."""
    found = getattr(found, "fget", found)
    return getattr(found, "__func__", found)


# of the protocol
OF_CHAINS = {
    "base_is_newest_at_takeover": Plant(
        f"{SAVE}.deltas:Changes.confirm", "base.place != fence.newest_at_takeover or not links", "not links"
    ),
    "parent_is_name": Plant(
        f"{SAVE}.commit:standing_on",
        "Link(link.ckpt_id, link.manifest.name, link.directory)",
        "Link(link.ckpt_id, link.manifest.save_id, link.directory)",
    ),
    "sync_base": Plant(
        "recckpt.output_dir.fence:make_durable",
        "storage.sync_dir(layout.join(checkpoint.directory, subdirectory))",
        "pass",
    ),
    "ephemeral_keeps_base": Plant(
        f"{SAVE}.save:write_and_commit", "to.changes is not None and not record.ephemeral", "to.changes is not None"
    ),
    "failed_keeps_marks": Plant(
        f"{MARKS}:Frozen.failed", "self._marks.end(self, None)", "self._marks.end(self, self.base)"
    ),
    "closure": Plant(
        "recckpt.output_dir.listing:Chains.closure", "for link in self.links(directory)", "for link in (directory,)"
    ),
    "keep_own_base": Plant(f"{ROTATION}:expired", "*([base] if base else [])", "*[]"),
    "dependents_first": Plant(
        f"{ROTATION}:in_order", "for name in by_name if not needed_by[name]]", "for name in by_name]"
    ),
    "check_before_removal": Plant(
        "recckpt.output_dir.fence:Fence.remove",
        "            self.check()\n            stays = not rotation.remove(",
        "            stays = not rotation.remove(",
    ),
    "sync_before_drop": Plant(f"{ROTATION}:sync_superseders", "if superseders and gone else []", "if False else []"),
    "superseded_first": Plant(f"{ROTATION}:in_order", "c.directory in taken", "c.directory not in taken"),
    "unique_names": Plant("recckpt.checkpoint.attempt:_intent_of_offer", OWN_NAME, 'save_id = "0" * 32'),
    "synced_before_whole": Plant(  # what is in the files; their names are synced by the owner, too
        "recckpt.storage.local_files:LocalSink.close",
        "os.fsync(fd)",
        "None if '.' in self._path.parent.parent.name[1:] else os.fsync(fd)",
    ),
    "adopt_whole": (
        Plant(f"{OFFERS}:_look_at", "next(file_problems(storage, directory, record.files), None)", "None"),
        Plant("recckpt.output_dir.commit:commit", "    check_files(storage, fence, directory, record, visible)\n", ""),
    ),
    "adopt_own_epoch": Plant(f"{OFFERS}:_reasons_against", "if record.epoch != epoch:", "if False:"),
    "adopt_what_counts": Plant(
        f"{OFFERS}:delta_of", "for c in listing.committed if", "for c in (*listing.committed, *listing.lost) if"
    ),
    "keeps_place": Plant(
        "recckpt.checkpoint.attempt:Attempt.offer", "*delta.place, ", "self.intent.epoch, delta.seq + 1, "
    ),
    "keeps_flags": Plant(
        "recckpt.checkpoint.attempt:Attempt.offer", "**content.content", "**{**content.content, 'ephemeral': False}"
    ),
    "last_whole": Plant(
        "recckpt.output_dir.listing:Chains._stand",
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
        "recckpt.sparse.table.store:MarkSet.move",
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
        Plant(f"{STORE}.add_column", "self._observers.replaced()", "pass"),
        Plant(f"{SAVE}.deltas:delta_proposal", " or base.slots.get(table.name) != slots", ""),
    ),
    "new_store_replaces": Plant(
        "recckpt.sparse.table.tracker:Tracker._of",
        "marks = self._marks[table.name] = _marks_of(table.store)",
        "before, marks = marks, _marks_of(table.store)\n"
        "        self._marks[table.name] = marks\n"
        "        marks.begin(before._since.base if before else '')",
    ),
    "replaced_is_agreed": Plant(
        f"{SAVE}.deltas:agreed_kind",
        "compress(tables.names, tables.is_replaced)",
        "compress(first.tables.names, first.tables.is_replaced)",
    ),
    "ephemeral_keeps_marks": Plant(
        f"{SAVE}.save:write_and_commit",
        COMMITTED,
        "        if record.ephemeral and staged.kind.base:\n            staged.committed(staged.kind.base)\n"
        + COMMITTED,
    ),
    "marks_know_their_base": Plant(f"{MARKS}:FrozenRows.is_replaced", "self.base != base", "self.base is None"),
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
LIVE_PLANTS = {
    "live rows are not copied aside": Plant(
        "recckpt.sparse.table.store:Observers.keep", "if snapshot is not None and len(rows):", "if False:"
    ),
    "a failed save has read the marks": Plant(
        "recckpt.sparse.table.marks:Marks.end", "_Since(before, sets[:1]) if base", "_Since(before, sets[1:]) if base"
    ),
    "rows are compared by the sum of Adagrad": (
        Plant(f"{PRINTS}:_prints_on_cpu", OF_SLOTS, OF_SUMS),
        Plant(f"{PRINTS}:_prints_of", OF_SLOTS, OF_SUMS),
    ),
    "AdamW changes the rows that Adagrad does": Plant(
        f"{RULES}:_adam_reason", 'return "its moments move every row at each step"', "return None"
    ),
    "a subclass is taken for its class": Plant(
        f"{RULES}:rule_of",
        "_RULES.get(type(optimizer))",
        "next((rule for kind, rule in _RULES.items() if isinstance(optimizer, kind)), None)",
    ),
    "a state that lies elsewhere is taken for that of before": Plant(
        "recckpt.live.store:LiveStore._noted_columns", "if self._memory != memory:", "if not self._memory:"
    ),
    "each rank marks what it looked up itself": (
        Plant(
            f"{ANNOUNCER}.install",
            "    for module in modules:\n",
            "    for module in modules:\n"
            "        module.register_forward_pre_hook(lambda module, args: vars(self).update(own=args[0].flatten()))\n",
        ),
        Plant(
            f"{ANNOUNCER}._announce_step",
            "        elif part.is_sparse:\n",
            "        elif table.reason is None:\n            self._door.announce(self.own)\n"
            "        elif part.is_sparse:\n",
        ),
    ),
    "the first table of a feature alone is marked": Plant(
        "recckpt.adapters.fbgemm:KernelHooks._rows",
        "if table in self._doors and begin < end:",
        "if table == tables[0] and begin < end:",
    ),
}


def without_fsync(of):
    return Plant("recckpt.storage.local_files:LocalSink.close", SYNC, f"None if {of} else {SYNC}")


def without_dir_fsync(of):
    return Plant("recckpt.storage.local_files:sync_entries", SYNC, f"None if {of} else {SYNC}")


COMMIT, PUT = "recckpt.output_dir.commit:commit", "        storage.put_if_absent(path, data)\n"
REMOVE = "recckpt.output_dir.rotation:remove"
LIST, ORDER = "recckpt.output_dir.listing:_list", "committed=committed"
MTIME = "__import__('os').stat(f'{storage.url}/{c.directory}/manifest.json').st_mtime_ns"
PLANTS = {
    "the index file before the manifest": Plant(
        COMMIT, PUT, f'        storage.replace(layout.INDEX_FILE, f"{{record.ckpt_id}}\\n".encode())\n{PUT}'
    ),
    "rotation before the commit": Plant(
        COMMIT,
        PUT,
        "        for found in fence.listing.committed:\n"
        f"            __import__('recckpt.output_dir.rotation').output_dir.rotation.remove(storage, found, 1)\n{PUT}",
    ),
    "the index file in place": Plant(
        "recckpt.storage.local:LocalStorage.replace",
        "temporary.replace(path)",
        "temporary.unlink(), path.write_bytes(data)",
    ),
    "data before the manifest at a removal": Plant(
        REMOVE,
        "        storage.remove(layout.join(checkpoint.directory, layout.MANIFEST))",
        "        for file in checkpoint.manifest.files:\n"
        "            storage.remove(layout.join(checkpoint.directory, file.name))\n"
        "        storage.remove(layout.join(checkpoint.directory, layout.MANIFEST))",
    ),
    "no fsync of data": without_fsync("self._path.suffix in ('.arrow', '.pt')"),
    "no fsync of the manifest": without_fsync("'manifest.json.' in self._path.name"),
    "no fsync of the index file": without_fsync("self._path.name.startswith('checkpoint.')"),
    "no fsync of directories": without_dir_fsync("True"),
    "no fsync of the directory of a checkpoint": without_dir_fsync("path.name.startswith('ckpt_')"),
    "no fsync of the output dir": without_dir_fsync("path.name == 'recorded'"),
    "an fsync that fails is passed over": tuple(
        Plant(
            f"recckpt.storage.local_files:{function}",
            f"    {SYNC}",
            f"    with suppress(OSError):\n                {SYNC}",
        )
        for function in ("LocalSink.close", "sync_entries")
    ),
    "a write that fails is taken for done": Plant(
        "recckpt.storage.local_files:LocalSink.write",
        "view = view[os.write(self._fd, view) :]",
        "with suppress(OSError):\n                os.write(self._fd, view)\n            view = view[:0]",
    ),
    "no fence check after the commit": Plant(
        COMMIT,
        '        storage.sync_dir("")\n        fence.check(is_thorough=True)\n',
        '        storage.sync_dir("")\n',
    ),
    "no fence check before a removal": Plant(
        "recckpt.output_dir.fence:Fence.remove",
        "            self.check()\n            stays = not rotation.remove(",
        "            stays = not rotation.remove(",
    ),
    "claims of earlier writers stay": Plant(
        "recckpt.output_dir.fence:Fence._take_over",
        "remove_older(self._storage, claim.epoch, layout.is_claim)",
        "None",
    ),
    "late commits count": Plant(
        "recckpt.output_dir.listing:_list",
        "takeover = _takeover(storage, damaged) if own is None else own",
        "takeover = NO_TAKEOVER",
    ),
    "an error publishes a file": Plant(
        "recckpt.storage.base:Sink.__exit__", "self.discard()\n        return", "self.close()\n        return"
    ),
    "an error publishes a large object": Plant(
        "recckpt.storage.upload:Upload.discard", "self._file.discard()", "self._file.commit()"
    ),
    "a manifest that was put is not read back": Plant(
        "recckpt.storage.objects:ObjectStorage._put", "        doubt = error\n", "        raise\n"
    ),
    "order by steps as strings": Plant(
        LIST, ORDER, "committed=tuple(sorted(committed, key=lambda c: str(c.manifest.step)))"
    ),
    "order by mtime": Plant(
        LIST,
        ORDER,
        f"committed=tuple(sorted(committed, key=lambda c: c.manifest.place if '://' in storage.url else {MTIME}))",
    ),
    "checksums of manifests are not compared": Plant(
        "recckpt.format.codec:check_seal", "if digest != int(match[2], 16):", "if False:"
    ),
    "checksums of files are not compared": Plant(
        "recckpt.output_dir.checkpoint_dir:_read_checked", " and found == entry.xxh3:", ":"
    ),
    "checksums of columns are not compared": Plant(
        "recckpt.sparse.files.part_reader:PartReader.checksum_problem", "if digest != expected:", "if False:"
    ),
    **DELTA_PLANTS,
    **LIVE_PLANTS,
}


def plants_of(name):
    """Return what a bug consists of."""
    found = PLANTS[name]
    return found if isinstance(found, tuple) else (found,)


def plant(name, patch=setattr):
    """Plant a bug, for the rest of this process or as long as what ``patch`` does lasts."""
    for bug in plants_of(name):
        patch(bug.function, "__code__", bug.code)
