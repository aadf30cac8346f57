"""`python -m flashattn`: see flashattn._cli."""

import sys

from flashattn._cli import main

if __name__ == "__main__":
    sys.exit(main())
