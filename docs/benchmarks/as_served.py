"""The loop's code as a server takes it: compiled where it is built, for benchmarks that import it themselves.

Imported before any of the server's rooms.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rose.aot.compiled_loop import use_compiled_loop

LOOP = use_compiled_loop()
