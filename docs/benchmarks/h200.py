"""Every HTTP figure of an H200 beside its baseline, its target and the GPU's floor: one command.

    python docs/benchmarks/h200.py --out DIR --budget-s 560 [--model NAME] [--job NAME] [--no-check]

For each model: one server with random weights of the exact shapes (BF16), fed msgpack by loadgen's suites
from other processes, the most telling first; and a server of fp32 reference vectors, idle while a case is
measured, to which a sample of each case's answers is compared. Writes loadgen's reports to
DIR/<model>/<job>/ after every case, and DIR/h200.md. The same command again goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from h200_table import NOTES, table, unmeasured
from serving import ROOT, Server

# A shorter rest is enough for no case.
LEAST_S = 12.0
# How much longer than its budget a suite may take before it is ended.
GRACE_S = 15.0
# The longest wait for a compiled tokeniser; the first start of a machine compiles it.
TOKENIZER_S = 25.0
DEFAULT_MODELS = ("pplx-embed", "bge-m3")


@dataclass(frozen=True)
class Job:
    """One run of loadgen: a suite and its flags. name: folder of its report. text: needs a corpus."""

    name: str
    suite: str
    flags: str
    text: bool = False


# In the order of their worth. The first hits of a shape, its capture and the search for the best batch are
# in the warm-up, which ends once the rate has settled. 1000 answers make a p99.
ARTICLE = (
    Job("latency", "latency", "--duration 15 --warmup 0.5 --max-warmup 3"),
    Job("polled", "polled", "--lengths 128,512 --duration 5 --warmup 0.5 --max-warmup 3"),
    Job("scoring", "scoring", "--duration 5 --requests 1000 --warmup 0.5 --max-warmup 3"),
    Job("throughput", "throughput", "--lengths 512,1024 --duration 10 --warmup 1 --max-warmup 4"),
    # A request takes 5 s: the queue is full after one of them.
    Job("throughput-4096", "throughput", "--lengths 4096 --duration 15 --warmup 6 --max-warmup 7"),
    Job("concurrency", "concurrency", "--in-flight 1,2,4,8,16 --duration 4 --warmup 0.5 --max-warmup 3"),
    # 100 queries a second, give or take a few in a hundred.
    Job("mixed", "mixed", "--duration 11 --warmup 1.5"),
    Job("open", "open", "--arrivals poisson --loads 50,80,100 --duration 7 --warmup 1 --max-warmup 3"),
    Job("text", "concurrency", "--in-flight 1,4,16 --duration 4 --warmup 0.5 --max-warmup 3", text=True),
    Job("concurrency-more", "concurrency", "--in-flight 32,64 --duration 4 --warmup 0.5 --max-warmup 3"),
)
# A round of 1024 requests of 64 × 512 tokens takes 11 s at 3 million tokens a second.
SHORT = (Job("short", "short", "--duration 12 --warmup 1 --max-warmup 14"),)
JOBS = {"pplx-embed": ARTICLE, "bge-m3": ARTICLE, "bge-base": SHORT}
# All of that waits at once.
SERVER_FLAGS = {"bge-base": ("--max-waiting-tokens", "40000000", "--max-waiting-seqs", "100000")}


def measure(model: str, flags: argparse.Namespace, deadline_s: float | None) -> None:
    """The jobs of `model` whose time is before `deadline_s` (monotonic), on one start of its server."""
    shapes = ["--model", model, "--load-format", "dummy", "--device", flags.device]
    if flags.tokenizer:
        shapes += ["--tokenizer", str(flags.tokenizer)]
    with ExitStack() as servers:
        server = servers.enter_context(Server(*shapes, *SERVER_FLAGS.get(model, ())))
        say(f"{model}: ready after {time.perf_counter() - server.started_s:.1f} s")
        wait_for_tokenizer(f"http://{server.host}:{server.port}/info")
        always = ["--url", f"http://{server.host}:{server.port}", "--resume", "--lines"]
        if flags.check:
            reference = servers.enter_context(Server(*shapes, program="docs/benchmarks/reference.py"))
            always += ["--check", f"http://{reference.host}:{reference.port}"]
        for number, job in enumerate(wanted(model, flags)):
            # What the client costs is the same in all of them.
            once = [] if number == 0 or job.suite == "short" else ["--no-overhead"]
            run(job, [*always, *once, *text_flags(job, flags)], flags.out / model, deadline_s)


def wait_for_tokenizer(info_url: str) -> None:
    """Until the server's own tokeniser is there: making it takes seconds of a core, and of the GIL."""
    ends_s = time.monotonic() + TOKENIZER_S
    while time.monotonic() < ends_s:
        with urllib.request.urlopen(info_url) as answer:
            if json.load(answer)["tokenizer"] != "tokenizers":
                return
        time.sleep(0.2)
    say(f"the tokenizer is not there after {TOKENIZER_S:.0f} s; measured beside its making")


def wanted(model: str, flags: argparse.Namespace) -> Iterator[Job]:
    """The jobs that were asked for and can be run."""
    for job in JOBS[model]:
        if (not flags.job or job.name in flags.job) and (not job.text or flags.corpus):
            yield job


def text_flags(job: Job, flags: argparse.Namespace) -> list[str]:
    """Where a job of text gets it."""
    if not job.text:
        return []
    exact = ["--tokenizer", str(flags.tokenizer)] if flags.tokenizer else []
    return ["--corpus", str(flags.corpus), *exact]


def run(job: Job, flags: list[str], folder: Path, deadline_s: float | None) -> None:
    """One run of loadgen, unless there is no time left for it."""
    budget: list[str] = []
    limit_s = None
    if deadline_s is not None:
        left_s = deadline_s - time.monotonic()
        if left_s < LEAST_S:
            say(f"{folder.name} {job.name}: no time left")
            return
        budget, limit_s = ["--budget-s", f"{left_s:.0f}"], left_s + GRACE_S
    say(f"{folder.name} {job.name}")
    command = [sys.executable, "-m", "loadgen", job.suite, *job.flags.split(), *flags, *budget]
    try:
        subprocess.run(
            [*command, "--report", str(folder / job.name)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        say(f"{folder.name} {job.name}: ended after its time; what it measured is kept")


def write(out: Path, models: Sequence[str], commit: str) -> str:
    """DIR/h200.md, from whatever reports there are."""
    title = "# One H200, HTTP with msgpack, BF16, random weights of the exact shapes"
    lines = [f"{title}\n\nCommit {commit}.", NOTES]
    for model in models:
        lines += table(model, out / model)
    missing = [line for model in models for line in unmeasured(model, out / model)]
    lines += ["\n## Not measured\n", *(f"- {line}" for line in missing)] if missing else []
    text = "\n".join(lines) + "\n"
    (out / "h200.md").write_text(text, "utf-8")
    return text


def commit_of(out: Path, given: str | None) -> str:
    """The commit that all of DIR's figures are of.

    Raises:
        SystemExit: DIR has figures of another one.
    """
    ask = ["git", "describe", "--always", "--dirty"]
    asked = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    path = out / "commit"
    commit = given or asked or (path.read_text().strip() if path.exists() else "unknown")
    if path.exists() and path.read_text().strip() != commit:
        raise SystemExit(f"{out} has figures of commit {path.read_text().strip()}, this is {commit}")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(commit + "\n")
    return commit


def say(words: str) -> None:
    """A line on stderr, where loadgen's lines are."""
    print(f"== {words}", file=sys.stderr, flush=True)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for what is measured")
    add("--model", action="append", choices=list(JOBS), help="repeatable; default: pplx-embed, bge-m3")
    add("--job", action="append", help="repeatable; default: all of the model's")
    add("--budget-s", type=float, help="end before this, the least telling cases left out and named")
    add("--corpus", type=Path, help="text file or folder: a run with text, too")
    add("--tokenizer", type=Path, help="tokenizer.json of that text, for server, reference and loadgen")
    add("--no-check", dest="check", action="store_false", help="compare no vectors with fp32")
    add("--commit", help="what the table says the figures are of (default: what git says)")
    add("--device", default="cuda", help="of the server and the reference")
    add("--table-only", action="store_true", help="only rewrite the table from DIR's reports")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, then write and print the tables."""
    # So that servers are ended when this process is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    flags = parsed(argv)
    models = flags.model or DEFAULT_MODELS
    commit = commit_of(flags.out, flags.commit)
    begun_s = time.monotonic()
    for number, model in enumerate(models if not flags.table_only else ()):
        deadline_s = None
        if flags.budget_s:
            # Each model gets an even share of what is left.
            left_s = begun_s + flags.budget_s - time.monotonic()
            deadline_s = time.monotonic() + left_s / (len(models) - number)
        try:
            measure(model, flags, deadline_s)
        finally:
            write(flags.out, models, commit)
    print(write(flags.out, models, commit))


if __name__ == "__main__":
    main()
