"""`python -m groupwise`: the command line."""

import sys

from groupwise.cli import command

sys.exit(command())
