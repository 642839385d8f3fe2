"""`python -m groupwise`: the command line."""

import sys

from groupwise.cli import main

sys.exit(main())
