"""A suite that a shell starts in the background ignores Ctrl-C, and so would the runs that its tests start and stop."""

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
