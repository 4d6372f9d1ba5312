"""What lies in a bucket before a save that is disturbed, and what must be true of it afterwards."""

import json
from itertools import count

import fsspec
from faults.job import Job
from fsspec.config import conf

from recckpt.format import layout
from recckpt.output_dir.listing import list_checkpoints

_numbers = count()

# name -> how many checkpoints are kept, how many there are, and which one the disturbed process takes up
SCENES = {"first": (1, 0, None), "rotation": (1, 1, None), "again": (2, 2, 1)}


class Store:
    """A bucket on a server, past all proxies."""

    def __init__(self, options):
        conf["s3"] = options
        self.fs = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
        self.bucket = f"faults-{next(_numbers)}"
        self.fs.mkdir(self.bucket)

    def objects(self, prefix):
        """Return name -> size of all objects below a prefix."""
        found = self.fs.find(f"{self.bucket}/{prefix}", detail=True)
        return {name.removeprefix(f"{self.bucket}/{prefix}/"): entry["size"] for name, entry in found.items()}

    def manifests(self, prefix):
        """Return the directories that hold a manifest."""
        return {name.partition("/")[0] for name in self.objects(prefix) if name.endswith(f"/{layout.MANIFEST}")}


class Scene:
    """An output dir, of which each try gets a copy.

    Attributes:
        before: the step that restores before the save.
        after: the step that is saved.
    """

    def __init__(self, store, name, make=Job):
        self.max_keep, self.before, self.restore_step = SCENES[name]
        self.after = (self.before if self.restore_step is None else self.restore_step) + 1
        self.store, self.make, self.prefix = store, make, f"scene-{next(_numbers)}"
        job = make(self.url(self.prefix), self.max_keep)
        for _ in range(self.before):
            job.advance()
            job.manager.save()
        self._files = {name: store.fs.cat_file(f"{store.bucket}/{self.prefix}/{name}") for name in self._names()}

    def url(self, prefix):
        return f"s3://{self.store.bucket}/{prefix}"

    def copy(self):
        """Return a new prefix with all that is here."""
        prefix = f"try-{next(_numbers)}"
        for name, data in self._files.items():
            self.store.fs.pipe_file(f"{self.store.bucket}/{prefix}/{name}", data)
        return prefix

    def check_loss(self, prefix, outcome, note):
        """Fail on any loss.

        Args:
            prefix: of the copy.
            outcome: "saved", "failed" or "killed".
            note: what was done, for messages.
        """
        new = self.store.manifests(prefix) - {name.partition("/")[0] for name in self._files}
        expected = self.after if new else self.before
        assert new or outcome != "saved", f"{note}: saved, and there is no manifest"
        job = self.make(self.url(prefix), self.max_keep)
        step = job.manager.restore()
        assert step == expected, f"{note}: {outcome}, restored {step}, expected {expected}"
        assert step == 0 or job.is_of_step(step), f"{note}: the state is not that of step {step}"
        damaged = list_checkpoints(job.saver.storage).damaged
        assert not damaged, f"{note}: damaged {damaged}"
        return job

    def check_next_save(self, prefix, job, note):
        """Save the next step, fail where that does not work, and remove the copy."""
        if job.manager.global_step != self.after:  # the same id once more, beside what is left of it
            job.manager.restore(self.restore_step)
        job.advance()
        job.manager.save()
        step = job.manager.global_step
        job.set_state(0)
        assert job.manager.restore() == step, f"{note}: the next save is not what restores"
        assert job.is_of_step(step), f"{note}: the state of the next save is not that of step {step}"
        found = self.store.manifests(prefix)
        assert len(found) == min(self.max_keep, len({*range(1, self.before + 1), step})), f"{note}: {found}"
        self.store.fs.rm(f"{self.store.bucket}/{prefix}", recursive=True)

    def new_files(self, prefix):
        """Return (name in its directory, size) of all files in directories that are not of this scene."""
        found = self.store.objects(prefix).items()
        return {(name.partition("/")[2], size) for name, size in found if "/" in name and name not in self._files}

    def _names(self):
        return self.store.objects(self.prefix)


def options_of(server, port):
    """Return how fsspec reaches a server through another port."""
    return {**server, "endpoint_url": f"http://127.0.0.1:{port}"}


def as_json(options):
    """Return options for a process of its own."""
    return json.dumps({key: value for key, value in options.items() if key != "session"})
