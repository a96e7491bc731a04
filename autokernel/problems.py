"""For problems that were set up before this module became kernelbench.problems."""

from autokernel.kernelbench.problems import *  # noqa: F403
