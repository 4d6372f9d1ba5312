"""``python -m recckpt`` is the command line."""

import sys

from recckpt.cli import main

sys.exit(main())
