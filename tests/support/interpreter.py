"""What Python does with its arguments, in a process that has begun already."""

import atexit
import os
import runpy
import signal
import sys
import threading
from pathlib import Path


def be_python(command):
    """Do with the arguments what Python does, to the end of this process, but take nothing apart that it has imported.

    That would take half a second.
    """
    code = 1
    try:
        _follow(command)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, int | None):
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _follow(command):
    """Do in ``__main__`` what Python does there with such arguments."""
    main = sys.modules["__main__"].__dict__
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = Path(command[0]).resolve()
    sys.argv = [str(script), *command[1:]]
    sys.path[0] = str(script.parent)
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    main.update(__file__=str(script), __doc__=None)
    exec(compile(script.read_bytes(), script, "exec", dont_inherit=True), main)
