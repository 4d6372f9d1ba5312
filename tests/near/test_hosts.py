"""A job on several hosts that die, go away, come back with old disks or hang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import PYTHONPATH

SCRIPT = Path(__file__).with_name("hosts_for_minutes.py")


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "ranks"), [(2, 1), (3, 1)])
def test_what_comes_back_after_each_loss_is_what_was_acknowledged(hosts, ranks):
    command = [sys.executable, SCRIPT, "--minutes", "0", "--lives", "3", "--hosts", f"{hosts}", "--ranks", f"{ranks}"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["lives"] == 3
