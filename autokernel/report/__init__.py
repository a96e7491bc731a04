"""What a run came to, for people: the terminal while it works, report.md and report.html after it."""

import logging


def _is_of_use(record: logging.LogRecord) -> bool:
    """Not what matplotlib says, in two lines, where it cannot write to the home folder: it uses a temporary one."""
    return record.funcName != "_get_config_or_cache_dir"


logging.getLogger("matplotlib").addFilter(_is_of_use)  # here, before a module of this package imports it
