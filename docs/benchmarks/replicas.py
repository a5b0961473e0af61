"""What several engines give, and what they cost the gateway in front of them.

    python docs/benchmarks/replicas.py gpu --devices cuda:0,cuda:1 --json FILE

serves the model on the first device, then on all of them, loads both with 100 x 512 tokens from 4 client
processes and then from 8, and prints the ratio of the throughputs, and what one sequence of 128 tokens takes
either way. 150 s at most.

    python docs/benchmarks/replicas.py loop

puts two simulated devices behind one gateway in two ways: engines in processes of their own, as a server has
them, and both in the gateway's own process, balanced by the same code. For each the CPU time that a request
takes of the gateway's process, which is what one loop can do at most, and the throughput on this machine.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving import ROOT, Server, machine

DUMMY = ("--model", "pplx-embed", "--load-format", "dummy")
SIMULATED = "docs/benchmarks/simulated_server.py"
SHAPES = ((100, 512, 4), (1, 128, 32))  # sequences, tokens, requests in flight in each client process


def load(server: Server, shape: tuple[int, int, int], processes: int, seconds: float) -> dict[str, Any]:
    """Throughput of one case of loadgen, and what it took of the gateway's process."""
    sequences, tokens, in_flight = shape
    url = f"http://{server.host}:{server.port}"
    flags = f"--batches {sequences} --lengths {tokens} --in-flight {in_flight} --processes {processes}"
    times = f"--duration {seconds} --warmup 1 --max-warmup {max(2.0, seconds / 2)} --no-overhead"
    before = _counters(url)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "load.json"
        command = [sys.executable, "-m", "loadgen", "custom", "--url", url, "--json", str(out)]
        command += [*flags.split(), *times.split()]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        stream = json.loads(out.read_text())["cases"][0]["streams"][0]
    after = _counters(url)
    requests = after["requests"] - before["requests"]
    return {
        "shape": f"{sequences} x {tokens}",
        "client_processes": processes,
        "embeddings_per_s": round(stream["embeddings_per_s"], 1),
        "p50_ms": round(stream["service"]["quantiles"]["p50"], 2),
        "gateway_cpu_ms_a_request": round((after["cpu_s"] - before["cpu_s"]) * 1e3 / requests, 3),
        "requests": int(requests),
    }


def _counters(url: str) -> dict[str, float]:
    page = urllib.request.urlopen(f"{url}/metrics").read().decode()
    done = re.findall(r'^ivy_requests_total\{route="/v1/embeddings",status="200"\} (\S+)', page, re.M)
    (cpu_s,) = re.findall(r"^ivy_process_cpu_seconds_total (\S+)", page, re.M)
    return {"requests": sum(map(float, done)), "cpu_s": float(cpu_s)}


def gpu(args: argparse.Namespace) -> dict[str, Any]:
    """One device, and all of them."""
    model = ("--model", args.model, "--load-format", args.load_format, *args.flags.split())
    devices = args.devices.split(",")
    shape = (args.batch, args.length, args.in_flight)
    runs: dict[str, list[dict[str, Any]]] = {}
    latency: dict[str, float] = {}
    ends_s = time.monotonic() + args.max_s
    for name, device in (("one", devices[0]), ("all", args.devices)):
        runs[name] = []
        with Server(*model, "--device", device) as server:
            print(f"{device}: ready after {time.perf_counter() - server.started_s:.1f} s", flush=True)
            for processes in (4, 8):
                if time.monotonic() + 2 * args.seconds + 15 > ends_s:
                    print(f"left out for want of time: {device}, {processes} client processes")
                    continue
                runs[name].append(load(server, shape, processes, args.seconds))
                print(f"{device}: {runs[name][-1]}", flush=True)
            alone = load(server, (1, 128, 1), 1, 3.0)
            print(f"{device}, one sequence at a time: {alone}", flush=True)
            latency[name] = alone["p50_ms"]
            if name == "all":
                info = json.loads(urllib.request.urlopen(f"http://{server.host}:{server.port}/info").read())
                print(f"replicas: {info['replicas']}")
    best = {
        name: max((run["embeddings_per_s"] for run in measured), default=0.0)
        for name, measured in runs.items()
    }
    ratio = best["all"] / best["one"] if best["one"] else 0.0
    print(f"{len(devices)} devices: {ratio:.3f} times the throughput of one ({best})")
    return {"devices": devices, "runs": runs, "ratio": round(ratio, 3), "p50_ms_1x128": latency}


def loop(args: argparse.Namespace) -> dict[str, Any]:
    """Engines in the gateway's process, and in processes of their own."""
    ways = {
        "one engine, no balancer": DUMMY,
        "two engines in one process": ("--together",),
        "two processes": (*DUMMY, "--replicas", "2", "--device", "cpu"),
    }
    found: dict[str, Any] = {}
    for name, flags in ways.items():
        with Server(*flags, program=SIMULATED) as server:
            found[name] = [load(server, shape, 1, args.seconds) for shape in SHAPES]
        for run in found[name]:
            print(f"{name}: {run}", flush=True)
    return found


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("gpu", "loop"))
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--model", default="pplx-embed")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--flags", default="", help="more of server.py's")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--max-s", type=float, default=150.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: Mapping[str, Any] = {"gpu": gpu, "loop": loop}[args.what](args)
    if args.json is not None:
        report = {"machine": machine("aiohttp", "uvloop"), "results": found}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
