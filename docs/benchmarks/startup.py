"""Times the start of the server: from the exec to the first vector over HTTP, MiniLM, median of five.

    .venv/bin/python docs/benchmarks/startup.py

Also times `import gateway.app` in a fresh interpreter, which must not bring in torch. Writes startup.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from serving import ROOT, Server, machine

RUNS = 5
IMPORT = (
    "import time; started = time.perf_counter(); import gateway.app, sys;"
    "print(time.perf_counter() - started, 'torch' in sys.modules)"
)


def first_answer_s() -> float:
    """Seconds from starting the process to having read its first vector."""
    with Server("--model", "minilm") as server:
        connection = http.client.HTTPConnection(server.host, server.port)
        body = json.dumps({"input": "Hello, world"})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200 or len(json.loads(response.read())["data"][0]["embedding"]) != 384:
            raise SystemExit("the first answer is wrong")
        return time.perf_counter() - server.started_s


def gateway_import_s() -> float:
    """Seconds that importing the gateway takes."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds, with_torch = done.stdout.split()
    if with_torch == "True":
        raise SystemExit("importing gateway imports torch")
    return float(seconds)


def main() -> None:
    """Measure, print and write."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    first_answer_s()  # page in what the runs read
    figures = {
        "machine": machine("torch", "aiohttp"),
        "first_answer_s": [round(first_answer_s(), 2) for _ in range(RUNS)],
        "gateway_import_s": [round(gateway_import_s(), 3) for _ in range(RUNS)],
    }
    for name in ("first_answer_s", "gateway_import_s"):
        runs = figures[name]
        print(f"{name:<18} median {statistics.median(runs):.2f} of {runs}")
    Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
