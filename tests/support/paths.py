"""Where the tests and their helpers lie, and what a process that a test starts needs to import them."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
PYTHONPATH = os.pathsep.join(map(str, (ROOT, TESTS)))
