"""A shell that has other programs in the place of those that take long."""

import os
from pathlib import Path

Path("bin").mkdir()
for name in ("python", "sleep"):
    program = Path("bin", name)
    program.write_text(f'#!/bin/sh\necho "{name} $*" >> calls\n[ {name} = sleep ] || [ "$(wc -l < calls)" -ge 5 ]\n')
    program.chmod(0o755)
os.environ["PATH"] = f"{Path('bin').absolute()}:{os.environ['PATH']}"
