"""Disks that tests need not wait for: nothing of a test is to outlive a loss of power.

What a loss of power leaves is tried by tests/faults, from the calls of other processes; what is to reach the disk, and
when, by tests/storage. Waiting for disks in all the other tests was half of the time that these took.
"""

import os

_fsync = os.fsync


def leave_to_the_kernel():
    """Let fsync of this process, and of its forks, look at no more than whether the file is open."""
    os.fsync = lambda fd: os.fstat(fd) and None


def wait_for_them():
    """Let fsync do what it does everywhere else."""
    os.fsync = _fsync
