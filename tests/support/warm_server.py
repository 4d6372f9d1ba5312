"""An interpreter that has imported all there is and forks processes which run scripts; driven by warm_python.py.

It runs no threads of ours, so that a fork is a whole process; those of Arrow, which it may have, know how to fork.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket

from support import disks
from support.interpreter import be_python

_IMPORTED = [  # by processes of several tests
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.optim"),
    *("recckpt.checkpointer", "recckpt.cli.app", "recckpt.convert", "recckpt.inspect", "recckpt.inspect.report"),
    *("matplotlib.backends.backend_svg", "pandas", "polars"),
]


def command_of_a_fork():
    """Take orders; returns in each process that is to follow one, with its command."""
    warm_up()
    orders = socket.socket(fileno=os.dup(0))
    while True:
        order, descriptors, *_ = socket.recv_fds(orders, 1 << 20, 4)
        if not order:
            os._exit(0)
        if os.fork() == 0:
            orders.close()
            *files, said = descriptors
            pid = os.fork()
            if pid:
                mind(pid, files, socket.socket(fileno=said))
            os.close(said)
            return become(files, **json.loads(order))
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def warm_up():
    """Load what torch, numba and recckpt put off to their first use."""
    import torch

    from support.builders import Run

    for name in _IMPORTED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    disks.leave_to_the_kernel()
    run = Run("memory://warm", deltas=True)
    for _ in range(2):
        run.train(1).manager.save()
    run.manager.restore()
    gc.collect()
    gc.freeze()  # else each fork would copy all pages of it when it ends


def mind(pid, files, said):
    """Be the parent of the process: send it the signals that are asked for, say how it ends, and end."""
    for file in files:
        os.close(file)
    said.send(str(pid).encode())
    over, asked = os.pidfd_open(pid), [said]
    while over not in select.select([over, *asked], [], [])[0]:
        number = said.recv(1)
        if not number:
            asked = []  # whoever started it is gone
        signal.pidfd_send_signal(over, number[0] if number else signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        said.send(str(code).encode())
    os._exit(0)


def become(files, command, cwd, env):
    """Make of this process one that was started for the command."""
    import torch

    torch.set_num_threads(1)  # for a fork, before gloo has threads: see whole_life() in rank_processes.py
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    return command


if __name__ == "__main__":
    be_python(command_of_a_fork())
