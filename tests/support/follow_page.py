"""Run as a script: follows a page of the documentation in the working directory."""

import sys

from documents import follow

follow(sys.argv[1])
