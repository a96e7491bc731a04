"""For kernel types that were added before this module became model.match."""

from autokernel.model.match import *  # noqa: F403
