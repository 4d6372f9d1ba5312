"""What lies in an output dir, and what goes on there, when a fault strikes."""

from dataclasses import dataclass, replace

from faults.job import NOTHING, Job, State, check_tidy, restored
from faults.tracing import Save, killing


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
    def after(self):
        return self.last.states[-1]

    def make(self, worker, url):
        """Run all processes but the last."""
        url.mkdir(parents=True)
        for save, kill in self.saves[:-1]:
            outcome = worker.run(url, self.max_keep, save, *(killing(*kill) if kill else ()))
            assert outcome.word == ("killed" if kill else "saved"), f"{save}: {outcome}"
            if self.pinned in save.steps:
                Job(url).manager.pin(self.pinned)
        if self.last.before == 0:
            restored(url, [self.before])

    def go_on(self, url, word):
        """Check what restores after the last save ended, and that others save beside whatever it has left."""
        allowed = {"saved": [self.after], "failed": [self.before]}.get(word, [self.before, self.after])
        job, found = restored(url, allowed)
        job.saver.max_keep = self.max_keep
        if found != self.after:
            job = Job.resumed(url, self.last.restore, self.max_keep)
            while job.manager.global_step < self.after.step:
                job.advance(self.after.branch)
            job.save()
        job.advance(self.after.branch)
        job.save()
        following = State(self.after.step + 1, self.after.branch)
        restored(url, [following])
        n_checkpoints = min(self.max_keep, following.step) + (self.pinned is not None)
        check_tidy(job.saver.storage, n_checkpoints, following)
        if self.pinned is not None:
            assert Job.resumed(url, self.pinned).holds(State(self.pinned)), f"pinned step {self.pinned} is gone"


def scene(max_keep, *saves, before, pinned=None):
    pairs = tuple(save if isinstance(save, tuple) else (save, None) for save in saves)
    return Scene(max_keep, pairs, before, pinned)


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
    "takeover in rotation": scene(1, FIRST, (SECOND, ("unlink", 8)), Save((3,)), before=State(2)),
    "pinned": scene(1, FIRST, SECOND, Save((3,)), before=State(2), pinned=1),
    "threads": scene(1, FIRST, replace(SECOND, threads=4), before=State(1)),
    "background": scene(1, FIRST, replace(SECOND, background=True), before=State(1)),
}
