"""``python -m weft``: the same as ``weft``."""

import sys

from weft.cli import main

if __name__ == "__main__":
    sys.exit(main())
