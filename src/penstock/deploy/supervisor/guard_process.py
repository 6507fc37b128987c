"""Ends process groups once whoever started this process is gone. Run by its path, with nothing of the package imported.

Its standard input has lines: `+GROUP` for a group that has started, `-GROUP` for one that has ended. The input's end means that the
supervisor is gone, in whatever way: the kernel kills its children then, and this process what these had started.
"""

import os
import signal
import sys


def main() -> None:
    """Keep to the lines, then kill."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # whoever ends a session's processes one by one: this one goes last
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
