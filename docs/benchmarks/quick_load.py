"""Every suite of the load generator in half a minute, on a small real model and the CPU: `make load-quick`.

    python docs/benchmarks/quick_load.py FOLDER

Starts the server and the fp32 reference, loads the one, and has its vectors compared with the other's.
The report in FOLDER shows what a report looks like; its figures are of too few requests to be quoted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from serving import ROOT, Server

MODEL = ("--model", "minilm")
LOAD = "--lengths 32 --batches 4 --in-flight 1,4 --loads 50 --arrivals poisson --duration 1.5"


def main() -> None:
    """Load it; the exit status is loadgen's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", help="for the report")
    folder = parser.parse_args().folder
    with Server(*MODEL) as server, Server(*MODEL, program="docs/benchmarks/reference.py") as reference:
        urls = ["--url", f"http://{server.host}:{server.port}"]
        urls += ["--check", f"http://{reference.host}:{reference.port}"]
        command = [
            sys.executable,
            "-m",
            "loadgen",
            "all",
            "--quick",
            *LOAD.split(),
            *urls,
            "--report",
            folder,
        ]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
    sys.exit(status)


if __name__ == "__main__":
    main()
