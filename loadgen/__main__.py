"""`python -m loadgen SUITE --url http://127.0.0.1:PORT`."""

from __future__ import annotations

import sys

from loadgen.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
