"""`python -m benchmarks NAME`, in the repository's root."""

import sys

from benchmarks.command import main

sys.exit(main())
