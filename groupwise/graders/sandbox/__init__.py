"""Programs that a model wrote, run where they can reach nothing.

limits.py     what a program may use
isolation.py  bubblewrap, namespaces, Landlock: what each needs
worker.py     one warm sandbox; the clock and the verdicts are kept outside
attacks.py    what a way of isolation must withstand before it is used
pool.py       which way this machine gets; sandboxes side by side
inside/       what runs behind the wall
"""

import sys

from groupwise.errors import RewardError

if sys.platform != "linux":
    raise RewardError(
        "Programs are run in isolation on Linux alone, so that the reward code can't be used here. "
        "Use a Linux machine, a virtual machine or a container."
    )
