"""For kernel types that were added before this module became several."""

from autokernel.model.match import *  # noqa: F403
from autokernel.model.patterns import *  # noqa: F403
