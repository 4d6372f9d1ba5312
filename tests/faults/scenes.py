"""What lies in an output dir, and what goes on there, when a fault strikes."""

from dataclasses import dataclass, replace

from faults.crash_worker import RESTORE
from faults.job import NOTHING, Job, State, check_tidy, restored
from faults.tracing import Save, killing

from recckpt.output_dir.listing import list_checkpoints


@dataclass(frozen=True)
class Scene:
    """A run of processes, of which some die; the fault strikes the last.

    Attributes:
        max_keep: of all of them.
        saves: what each does, and the call at which it is killed, such as ``("write", 60)``.
        before: what restores before the last save.
        pinned: a step whose checkpoint stays whatever ``max_keep`` says.
    """

    max_keep: int
    saves: tuple[tuple[Save, tuple[str, int] | None], ...]
    before: State
    pinned: int | None = None

    @property
    def last(self):
        return self.saves[-1][0]

    @property
    def deltas(self):
        """Whether the saves are of what has changed, as far as they can be."""
        return self.last.deltas

    @property
    def kind(self):
        """What its processes save, as options of a job."""
        return {"deltas": self.deltas, "live": self.last.live}

    @property
    def after(self):
        return self.last.states[-1]

    def counted(self, harness):
        """Return under which name a harness counts: deltas by themselves, and those of live tables."""
        if self.last.live:
            return f"{harness}, live tables, max_keep {self.max_keep}"
        return f"{harness}, deltas, max_keep {self.max_keep}" if self.deltas else harness

    def make(self, worker, url):
        """Run all processes but the last."""
        url.mkdir(parents=True)
        for save, kill in self.saves[:-1]:
            outcome = worker.run(url, self.max_keep, save, *(killing(*kill) if kill else ()))
            assert outcome.word == ("killed" if kill else "saved"), f"{save}: {outcome}"
            if self.pinned in save.steps:
                Job(url, **self.kind).manager.pin(self.pinned)
        if self.last.before == 0:
            restored(url, [self.before], **self.kind)

    def go_on(self, url, word):
        """Check what restores after the last save ended, and that others save beside whatever it has left."""
        allowed = {"saved": [self.after], "failed": [self.before]}.get(word, [self.before, self.after])
        job, found = restored(url, allowed, **self.kind)
        job.saver.max_keep = self.max_keep
        if found != self.after:
            job = Job.resumed(url, self.last.restore, self.max_keep, **self.kind)
            while job.manager.global_step < self.after.step:
                job.advance(self.after.branch)
            job.save()
        job.advance(self.after.branch)
        job.save()
        following = State(self.after.step + 1, self.after.branch)
        restored(url, [following], **self.kind)
        n_checkpoints = min(self.max_keep, following.step) + (self.pinned is not None)
        is_kept = self.kept_links(job.saver.storage) if self.deltas else n_checkpoints
        check_tidy(job.saver.storage, is_kept, following)
        if self.pinned is not None:
            pinned = Job.resumed(url, self.pinned, **self.kind)
            assert pinned.holds(State(self.pinned)), f"pinned step {self.pinned} is gone"

    def kept_links(self, storage):
        """Return the rule which says what may be there where there are deltas: what is kept, and all it stands on."""
        committed, current = list_checkpoints(storage).committed, list_checkpoints(storage).current
        kept = current[-self.max_keep :] + [c for c in current if c.manifest.step == self.pinned]
        newest_full = current[-1].links[-1]
        if self.max_keep > 1:
            kept += [c for c in current if newest_full not in c.links][-1:]
        made = [c.manifest for c in committed if c.manifest.supersedes]
        late = {each.name for each in made if (each.epoch, each.seq) > current[-1].manifest.place}
        kept += [c for c in committed if c.manifest.save_id in late]  # the next rotation has what they stand for
        directories = {link.directory for checkpoint in kept for link in checkpoint.links}
        return lambda checkpoint: checkpoint.directory in directories


def scene(max_keep, *saves, before, pinned=None, deltas=False, live=False):
    pairs = tuple(save if isinstance(save, tuple) else (save, None) for save in saves)
    done = tuple((replace(save, deltas=deltas or live, live=live), kill) for save, kill in pairs)
    return Scene(max_keep, done, before, pinned)


FIRST, SECOND = Save((1,)), Save((2,))
SCENES = {
    "first": scene(1, FIRST, before=NOTHING),
    "rotation": scene(1, FIRST, SECOND, before=State(1)),
    "rotation of 2": scene(2, FIRST, SECOND, Save((3,)), before=State(2)),
    "rotation of 3": scene(3, FIRST, SECOND, Save((3,)), Save((4,)), before=State(3)),
    "same writer": scene(1, Save((1, 2), before=1), before=State(1)),
    "again": scene(1, FIRST, Save((1,), branch=1, restore="nothing"), before=State(1)),
    "again of 2": scene(2, FIRST, SECOND, Save((2,), branch=1, restore=1), before=State(2)),
    # a half-written directory of a dead writer, and the claim of another that died before it had published its list
    "takeover": scene(1, FIRST, (SECOND, ("write", 60)), (SECOND, ("link", 2)), SECOND, before=State(1)),
    # a writer died while it removed what it had replaced
    "takeover in rotation": scene(1, FIRST, (SECOND, ("unlink", 10)), Save((3,)), before=State(2)),
    "pinned": scene(1, FIRST, SECOND, Save((3,)), before=State(2), pinned=1),
    "threads": scene(1, FIRST, replace(SECOND, threads=4), before=State(1)),
    "background": scene(1, FIRST, replace(SECOND, background=True), before=State(1)),
}
FOUR = FIRST, SECOND, Save((3,)), Save((4,))  # of one full checkpoint, two deltas, and a full one again
SCENES |= {
    "delta": scene(1, *FOUR[:2], before=State(1), deltas=True),
    "delta on a delta": scene(2, *FOUR[:3], before=State(2), deltas=True),
    "full after deltas": scene(1, *FOUR, before=State(3), deltas=True),
    "full after deltas of 2": scene(2, *FOUR, before=State(3), deltas=True),
    "delta on the second full": scene(2, *FOUR, Save((5,)), before=State(4), deltas=True),
    "deltas of one writer": scene(1, Save((1, 2, 3), before=2), before=State(2), deltas=True),
    "delta again": scene(2, *FOUR[:2], Save((2,), branch=1, restore=1), before=State(2), deltas=True),
    "takeover of deltas": scene(1, *FOUR[:2], (Save((3,)), ("write", 60)), Save((3,)), before=State(2), deltas=True),
    "takeover in rotation of deltas": scene(
        1, *FOUR[:3], (FOUR[3], ("unlink", 10)), Save((5,)), before=State(4), deltas=True
    ),
    "pinned delta": scene(1, *FOUR, Save((5,)), before=State(4), pinned=2, deltas=True),
    "delta in the background": scene(1, Save((1, 2), before=1, background=True), before=State(1), deltas=True),
}
SCENES |= {
    "live delta": scene(1, *FOUR[:2], before=State(1), live=True),
    "live delta on a delta": scene(2, *FOUR[:3], before=State(2), live=True),
    "full after live deltas": scene(1, *FOUR, before=State(3), live=True),
    "live delta in the background": scene(1, Save((1, 2), before=1, background=True), before=State(1), live=True),
    "takeover of live deltas": scene(1, *FOUR[:2], (Save((3,)), ("write", 60)), Save((3,)), before=State(2), live=True),
}
OFFER = replace(Save((3,)), offers=True)  # 2 is compacted, and that is adopted after this save
OFFERS_AND_DOUBTS = {
    "offer and adoption": scene(1, *FOUR[:2], OFFER, before=State(2), deltas=True),
    "rotation of a delta": scene(1, *FOUR[:2], OFFER, FOUR[3], before=State(3), deltas=True),
    # a writer died before its commit was durable, and the next stands on that; or drops what such a one supersedes
    "delta in doubt": scene(1, FIRST, (SECOND, ("unlink", 6)), Save((3,)), before=State(2), deltas=True),
    "live offer and adoption": scene(1, *FOUR[:2], OFFER, before=State(2), live=True),
    "adoption in doubt": scene(
        2, *FOUR[:2], (OFFER, ("unlink", 9)), Save((2,), branch=1, restore=1), before=State(3), deltas=True
    ),
}
FORGETS = replace(Save((3,)), forgets=1)  # an id that the second checkpoint has deleted: what restores is the same
FORGETTING = {
    # who forgot has died before the checkpoint without the id was durable, and the next removes the one with it
    "forgetting in doubt": scene(
        2, *FOUR[:2], (FORGETS, ("unlink", 8)), Save((3,), before=RESTORE), before=State(2), deltas=True
    ),
}
OFFER_WAITS = OFFER, ("link", 5)  # died at its INTENT
OFFERS = {
    "offer waiting": scene(1, *FOUR[:2], OFFER_WAITS, Save((3,)), before=State(2), deltas=True),
    "offer waiting of 2": scene(2, *FOUR[:2], OFFER_WAITS, Save((3,)), before=State(2), deltas=True),
    "offer and adoption of 2": scene(2, *FOUR[:2], OFFER, before=State(2), deltas=True),
    "rotation of a delta of 2": scene(2, *FOUR[:2], OFFER, FOUR[3], before=State(3), deltas=True),
}
