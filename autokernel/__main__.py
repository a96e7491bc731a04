"""python -m autokernel, or this file by its path: the console command, whatever lies in the folder that it is called in."""

import sys
from pathlib import Path

if __name__ == "__main__":  # a process that a model's code starts has it under another name
    place = str(Path(__file__).resolve().parents[1])
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # that folder: a torch.py or an autokernel.py there is not ours
    sys.path.insert(0, place)
    import autokernel  # noqa: F401 this very package

    sys.path.remove(place)
    from autokernel.cli.main import main

    raise SystemExit(main())
