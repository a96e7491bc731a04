"""python -m autokernel: the console command."""

from autokernel.cli.main import main

raise SystemExit(main())
