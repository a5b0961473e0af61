"""The closed set of engine errors; the scheduler and gateway convert them at their seams."""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises after it has started."""


class StepError(EngineError):
    """One step failed; other steps and later ones are not affected."""


class OutOfMemoryError(StepError):
    """The device had too little memory for this step; a smaller one may fit."""


class EngineDeadError(EngineError):
    """The device or its worker can run no further step: a sticky CUDA error, a hung step, a closed engine."""


class ModelLoadError(Exception):
    """A model could not be loaded. The message is one line that says what to do."""
