"""A local directory as a network file system shows it: what others have written appears after some looks."""

from dataclasses import replace

from recckpt.storage.local import LocalStorage
from recckpt.storage.transfers import VISIBLE


class LateStorage(LocalStorage):
    """Shows a file as it is only after it has been looked at; time passes only between looks.

    Attributes:
        late: name -> what is seen of the file at first, a size or None for no file, one look each.
        waited: seconds.
        visible: how to look for files of others, in this time.
    """

    def __init__(self, path, timeout_sec=60.0):
        super().__init__(str(path))
        self.late, self.waited = {}, 0.0
        self.visible = replace(VISIBLE, deadline_sec=timeout_sec, sleep=self._sleep, clock=lambda: self.waited)

    def size(self, name):
        seen = self._look(name)
        return super().size(name) if seen is None else seen

    def listed(self, directory):
        found = super().listed(directory)
        return {name: file for name, file in found.items() if not self.late.get(f"{directory}/{name}")}

    def read(self, name, max_bytes):
        self._look(name)
        return super().read(name, max_bytes)

    def _look(self, name):
        """Return the size that is seen, None for the true one."""
        if not self.late.get(name):
            return None
        seen = self.late[name].pop(0)
        if seen is None:
            raise FileNotFoundError(2, "not yet", name)
        return seen

    def _clock(self):
        return self.waited

    def _sleep(self, seconds):
        self.waited += seconds
