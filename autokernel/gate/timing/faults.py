"""What can go wrong while kernels are timed, and whose fault it is."""


class BaselineFault(RuntimeError):
    """A baseline or an incumbent failed while it was timed beside the candidate."""


class Inconclusive(Exception):
    """An audit came to no result, which other load on the machine may explain: the pair does not count."""


class RefusedWhileTimed(Exception):
    """A kernel was wrong, late, or not at work itself, while it was timed."""

    def __init__(self, case: str, seed: int, reason: str):
        super().__init__(reason)
        self.case, self.seed, self.reason = case, seed, reason
