"""Run as a script: follows a page of the documentation in the working directory."""

import sys

from support.documents import follow

follow(sys.argv[1])
