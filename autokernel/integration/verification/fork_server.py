"""Imported by the fork server of processes.py alone: the folder of its socket goes with it, for a parent that was killed
leaves it behind."""

import atexit
import os
import shutil
from multiprocessing import forkserver
from pathlib import Path


def _remove(server: int) -> None:
    """Of the server, which ends once nobody is left to ask it; what it forked may do at its end what is registered here."""
    address = forkserver._forkserver._forkserver_address
    if os.getpid() == server and address:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


atexit.register(_remove, os.getpid())
