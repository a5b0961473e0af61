"""Models that go through all layers of few tokens in one launch, which makes its own attention."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class OneLaunch(Protocol):
    """What such a model has beside `rose.models.registry.Model`."""

    def in_one_launch(self, num_tokens: int) -> bool:
        """Whether a forward of so many tokens, padding included, calls no attention backend."""
        ...


def in_one_launch(model: object, num_tokens: int) -> bool:
    """As `OneLaunch.in_one_launch`, of any model: one that does not say so has no such launch."""
    return isinstance(model, OneLaunch) and model.in_one_launch(num_tokens)
