"""`python -m benchmarks NAME`, in the repository's root."""

import signal
import sys

from benchmarks.command import main

_EXIT_TERMINATED = 128 + signal.SIGTERM

# as an exception, so that servers which the experiment started are stopped
signal.signal(signal.SIGTERM, lambda *_: sys.exit(_EXIT_TERMINATED))
sys.exit(main())
