"""Kills process groups when the supervisor ends. Run by its path; imports nothing of the package.

Standard input has lines: `+GROUP` for a group that has started, `-GROUP` for one that has ended. At the end of the
input the supervisor is gone: the kernel has killed its children, and this process kills the remaining groups.
"""

import os
import signal
import sys


def main() -> None:
    """Read lines until the end of input, then kill the groups left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # against SIGTERM and SIGHUP to a whole session, which is the supervisor's: the guard ends last
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    main()
