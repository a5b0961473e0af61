"""The same shards by a pool of Ray Data's actors, each with an engine of its own.

An actor that dies is started anew and its shards are run again; those that it had committed are found done.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, redirect_stdout
from types import TracebackType
from typing import Any

import msgspec
import ray
import ray.data
from ray.exceptions import RayError

from gateway.corpus import signals
from gateway.corpus.commits import Outcome
from gateway.corpus.driver import Work
from gateway.corpus.errors import CorpusError
from gateway.corpus.options import RayOptions
from gateway.corpus.ray_actor import ShardActor

# Blocks of the list of shards; an actor runs one block after another, and all of one again if it dies.
_MOST_BLOCKS = 4096
# Shards that an actor has at once: one is read while the one before is written.
_SHARDS_AT_ONCE = 2
_CONNECT_S = 5.0


class RayPool:
    """A cluster that is joined, or started, for one job.

    actors: how many there are at most.
    """

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        # stdout is the summary's; Ray tells of dead actors there.
        self._stdout = ExitStack()
        self.actors = 0

    def __enter__(self) -> RayPool:
        """Join the cluster.

        Raises:
            CorpusError: there is none, or it has no room for one actor.
        """
        _check_listens(self._options.address)
        self._stdout.enter_context(redirect_stdout(sys.stderr))
        try:
            ray.init(self._options.address, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            self._stdout.close()
            raise CorpusError(f"--ray-address {self._options.address}: {_line(error)}") from error
        self.actors = self._options.actors or self._room()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()
        self._stdout.close()

    def run(self, work: Work, done: Callable[[Outcome], None], tell: Callable[[int, int], None]) -> None:
        """A Runner: see driver. Rows are told when their shard is done.

        Raises:
            CorpusError: an actor cannot go on, or died too often.
        """
        try:
            # Again, as joining the cluster put Ray's own handlers there.
            with signals.raised(), closing(self._results(work)) as results:
                for result in results:
                    if result["error"]:
                        raise CorpusError(str(result["error"]))
                    outcome = msgspec.json.decode(result["outcome"], type=Outcome)
                    done(outcome)
                    tell(outcome.rows + outcome.rejected, outcome.tokens)
        except RayError as error:
            raise CorpusError(f"the cluster failed: {_line(error)}") from error

    def _results(self, work: Work) -> Generator[dict[str, Any]]:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray").setLevel(logging.ERROR)
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        shards = [{"shard": shard.index} for shard in work.shards]
        listed = ray.data.from_items(shards, override_num_blocks=min(len(shards), _MOST_BLOCKS))
        results = listed.map_batches(
            ShardActor,
            batch_size=1,
            fn_constructor_args=(work.options, work.model, work.id_type, work.run),
            compute=ray.data.ActorPoolStrategy(
                size=self.actors,
                max_tasks_in_flight_per_actor=_SHARDS_AT_ONCE,
                max_concurrent_calls_per_actor=_SHARDS_AT_ONCE,
                enable_true_multi_threading=True,
            ),
            num_gpus=self._options.gpus_per_actor or None,
            num_cpus=self._options.cpus_per_actor,
        )
        yield from results.iter_rows()

    def _room(self) -> int:
        """Actors for which the cluster has the GPUs and CPUs."""
        resources, options = ray.cluster_resources(), self._options
        wanted = {"GPU": options.gpus_per_actor, "CPU": options.cpus_per_actor}
        room = min(int(resources.get(name, 0) / share) for name, share in wanted.items() if share > 0)
        if room < 1:
            has = ", ".join(f"{resources.get(name, 0):g} {name}" for name in wanted)
            raise CorpusError(
                f"an actor needs {options.gpus_per_actor:g} GPU and {options.cpus_per_actor:g} CPU; the"
                f" cluster has {has} (--gpus-per-actor, --cpus-per-actor)"
            )
        return room


def _check_listens(address: str) -> None:
    """Refuse HOST:PORT where nothing listens; Ray would wait for it for minutes.

    Raises:
        CorpusError: see above.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise CorpusError(f"--ray-address {address}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """The last line of what Ray says, which is the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
