"""A key-value store as ranks share it, in this process."""

import threading


class MemoryStore:
    """What the ranks of torch.distributed share, in this process."""

    def __init__(self):
        self._values, self._lock = {}, threading.Lock()

    def set(self, key, value):
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key):
        return self._values[key]

    def check(self, keys):
        with self._lock:
            return all(key in self._values for key in keys)

    def compare_set(self, key, expected, desired):
        with self._lock:
            return self._values.setdefault(key, desired.encode())

    def delete_key(self, key):
        return self._values.pop(key, None) is not None

    def keys(self):
        return list(self._values)
