"""The model with its kept kernels against the model without: the same outputs, and how much faster, end to end.

sides.py     ways to run a model, timed in turns, in child processes
parity.py    is it still itself
notes.py     what was found so far, if it is interrupted
trial.py     verify(): which kernels stay, and what the model gains
record.py    what was found, for machines and for people
"""

from autokernel.verification.record import Verification as Verification
from autokernel.verification.trial import Settings as Settings
from autokernel.verification.trial import verify as verify
