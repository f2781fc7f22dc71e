"""`python -m sdopt`, where the folder of the console script is not on PATH."""

import sys

from sdopt.cli import main

if __name__ == "__main__":
    sys.exit(main())
