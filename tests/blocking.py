"""A call that blocks, made by the gateway or the scheduler on the event loop, fails the test that runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

# What a server does before it answers anyone; and pages for people, read when first asked for.
_AT_START = {
    "gateway/startup.py": {"listen_at", "close"},
    "gateway/tokenization/huggingface.py": {"from_file"},
    "gateway/routes/docs.py": {"read"},
    "gateway/web/files.py": {"names", "read"},
}


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[BlockBuster]:
    """Sleeping, files, sockets, by whatever code of ours is somewhere on the stack.

    Locks count not: that of a tracer's queue, which is held for microseconds, is met with every span.
    """
    with blockbuster_ctx(["gateway", "scheduler"]) as found:
        for lock in ("threading.Lock.acquire", "threading.Lock.acquire_lock"):
            found.functions[lock].deactivate()
        for name, function in found.functions.items():
            if name.startswith(("os.", "io.", "socket.")):
                for file, functions in _AT_START.items():
                    function.can_block_in(file, functions)
        yield found
