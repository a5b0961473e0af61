"""`server.py corpus` over a scripted engine and a tokenizer of bytes, as a process that starts at once."""

from __future__ import annotations

import argparse
import os
import sys

from gateway.corpus import command, flags
from tests.corpus.jobs import fake_model
from tests.fakes import FakeEngine, fake_info

# A step takes so many seconds, and a vector has so many values; by these variables.
STEP_S, DIMENSIONS = "FAKE_STEP_S", "FAKE_DIMENSIONS"

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    info = fake_info(dimensions=int(os.environ.get(DIMENSIONS, "8")))
    engine = FakeEngine(info=info, service_s=float(os.environ.get(STEP_S, "0")))
    options = flags.corpus_options(parser.parse_args())
    sys.exit(command.run(options, None, fake_model(engine), "test"))
