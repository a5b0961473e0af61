"""What the HTTP benchmarks share: a server process on loopback, and what machine this is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
END_S = 30.0
READY = re.compile(r"ready after [\d.]+ s at http://([^:]+):(\d+)")


class Server(AbstractContextManager["Server"]):
    """`PROGRAM FLAGS` on a free port, ready once it is made. started_s: perf_counter at its start."""

    def __init__(self, *flags: str, program: str = "server.py") -> None:
        self.started_s = time.perf_counter()
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, program, "--port", "0", *flags],
            cwd=ROOT,
            # A script's own folder comes first in its path, and not this checkout's.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.host, self.port = self._address()

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._process.pid

    def _address(self) -> tuple[str, int]:
        for line in self._process.stdout or ():
            if found := READY.match(line):
                return found.group(1), int(found.group(2))
        raise SystemExit(f"the server ended with status {self._process.wait()} before it was ready")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def machine(*packages: str) -> dict[str, object]:
    """Processor, its cores this process may use, Python and the versions of `packages`."""
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        cpu = found.group(1) if found else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }
