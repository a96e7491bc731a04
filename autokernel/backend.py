"""For environments that were installed before torch.compile's backend moved to integration/apply.py."""

from autokernel.integration.apply import *  # noqa: F403
