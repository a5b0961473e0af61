"""`server.py corpus` over a scripted engine and a tokenizer of bytes, as a process that starts at once."""

from __future__ import annotations

import argparse
import os
from functools import partial

from gateway.corpus import command, flags
from gateway.corpus.options import LoadedModel, ModelSource
from gateway.process import leave
from scheduler.options import SchedulerOptions
from tests.corpus.jobs import TOKENIZER
from tests.fakes import FakeEngine, fake_info

# A step takes so many seconds, and a vector has so many values; by these variables.
STEP_S, DIMENSIONS = "FAKE_STEP_S", "FAKE_DIMENSIONS"


def load(dimensions: int, step_s: float) -> LoadedModel:
    """Also in an actor, which imports it."""
    engine = FakeEngine(info=fake_info(dimensions=dimensions), service_s=step_s)
    return LoadedModel(engine, TOKENIZER, "d1", SchedulerOptions())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.set_defaults(device="cpu")
    flags.add_flags(parser)
    args = parser.parse_args()
    loading = partial(load, int(os.environ.get(DIMENSIONS, "8")), float(os.environ.get(STEP_S, "0")))
    model = ModelSource("fake", "d1", "auto", loading)
    return command.run(flags.corpus_options(args, os.environ), flags.ray_options(args), model, "test")


if __name__ == "__main__":
    from tests.corpus import fake_command  # not as __main__, which an actor could not import

    leave(fake_command.main())
