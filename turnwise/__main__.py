"""`python -m turnwise` is `turnwise`."""

import sys

from turnwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
