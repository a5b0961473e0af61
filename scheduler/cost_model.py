"""How long a step takes, learned from the steps that ran. Pure arithmetic: no clock, no engine.

Steps fall into classes by mean sequence length (octaves: attention makes long sequences dearer a token) and,
within a class, into cells by tokens (half octaves). A cell remembers its last samples and stands for one of
them, from the faster third: cold steps, graph captures and a stalled loop make a step look slower than it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import log2

_SAMPLES = 16  # a cell forgets what is older, so it follows clocks, heat and neighbours
_TRUSTED = 4  # samples before a cell has a say in the budget: the first may be warm-up and capture
# So many steps in so many try twice the budget: a poor first impression heals. Sooner at first: of three
# servers that start together on one GPU each took the others' forwards for its own.
_PROBE_EVERY, _PROBE_EARLY, _PROBES = 512, 64, 4
# A rate counts as good enough when batches of this many times the tokens were no better. Half an octave
# can gain less than the tolerance and the next half again: on an H200 steps stayed at 870 tokens while
# requests of 5 x 512 tokens waited, which took 5.8 ms.
_REACH = 2
_NOTICEABLE = 0.02  # a smaller change of a cell's time is noise, and not worth new curves
_RATE_WEIGHT = 0.05  # of a new step in the drain rate: about the last 20 steps


@dataclass(frozen=True, slots=True)
class CostPoint:
    """One measured step: `tokens` in `seqs` sequences took `ms` milliseconds."""

    tokens: int
    seqs: int
    ms: float


@dataclass(slots=True)
class _Cell:
    """Samples of one kind of step; `ms` and `tokens` are the sample that stands for them."""

    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    ms: float = 0.0
    tokens: int = 0
    trusted: bool = False

    def add(self, tokens: int, ms: float) -> bool:
        """Take a sample; True when the cell stands for something else than before."""
        self.samples.append((ms, tokens))
        chosen_ms, chosen_tokens = sorted(self.samples)[(len(self.samples) - 1) // 3]
        trusted = self.trusted or len(self.samples) >= _TRUSTED
        moved = abs(chosen_ms - self.ms) > _NOTICEABLE * self.ms or trusted != self.trusted
        if moved:
            self.ms, self.tokens, self.trusted = chosen_ms, chosen_tokens, trusted
        return moved


class _Curve:
    """Step time over tokens, through cells of one class; more tokens never take less time.

    knee: the fewest tokens within `tolerance` of the best rate up to `ceiling` tokens, or, as long as no
    batch of `_REACH` times as many is known, that many.
    """

    __slots__ = ("knee", "ms", "tokens")

    def __init__(self, cells: Iterable[_Cell], tolerance: float, ceiling: int) -> None:
        rising = sorted((cell.tokens, cell.ms) for cell in cells)
        self.tokens = [tokens for tokens, _ in rising]
        self.ms = list(accumulate((ms for _, ms in reversed(rising)), min))[::-1]
        # Larger batches, of one job each, are nobody's measure: what others wait for is to stay short.
        counted = max(1, bisect_right(self.tokens, ceiling))
        rates = [tokens / ms for tokens, ms in zip(self.tokens[:counted], self.ms, strict=False)]
        first = next(index for index, rate in enumerate(rates) if rate >= (1 - tolerance) * max(rates))
        reach = _REACH * self.tokens[first]
        self.knee = self.tokens[first] if self.tokens[-1] >= reach else reach

    def at(self, tokens: int) -> float:
        """Milliseconds of a step; outside of what is known, in proportion to its tokens."""
        right = bisect_left(self.tokens, tokens)
        if right == 0 or right == len(self.tokens):
            edge = min(right, len(self.tokens) - 1)
            return self.ms[edge] * tokens / self.tokens[edge]
        left = right - 1
        share = (tokens - self.tokens[left]) / (self.tokens[right] - self.tokens[left])
        return self.ms[left] + share * (self.ms[right] - self.ms[left])


class CostModel:
    """Predicts step times, and says how many tokens a batch needs to keep the device efficient.

    floor, ceiling: bounds of the budget, in tokens. tolerance: the gain in throughput that is not worth a
    longer batch, e.g. 0.05. seed: points measured before, believed until steps of their kind have run.
    """

    def __init__(
        self, *, floor: int, ceiling: int, tolerance: float = 0.05, seed: Iterable[CostPoint] = ()
    ) -> None:
        self._floor = min(floor, ceiling)
        self._ceiling = ceiling
        self._tolerance = tolerance
        self._classes: dict[int, dict[int, _Cell]] = {}
        self._curves: dict[tuple[int, bool], _Curve | None] = {}
        self._unlearned: list[tuple[int, int, float]] = []
        self._observed = 0
        self._mean_tokens = 0.0
        self._mean_ms = 0.0
        for point in seed:
            cell = self._cell(point.tokens, point.seqs)
            cell.add(point.tokens, point.ms)
            cell.trusted = True

    def observe(self, tokens: int, seqs: int, ms: float) -> None:
        """Learn from a step that has run in `ms` milliseconds, more than 0: when asked next.

        A step is observed while its answers wait, and asked for behind a launch, when the device has work.
        """
        self._unlearned.append((tokens, seqs, ms))

    def predict(self, tokens: int, seqs: int) -> float:
        """Milliseconds that such a step takes; 0.0 before anything is known."""
        self._learn()
        curve = self._nearest_curve(_length_class(tokens, seqs), trusted=False)
        return 0.0 if curve is None else curve.at(tokens)

    def budget(self, tokens: int, seqs: int) -> int:
        """Tokens that a batch of such sequences (`tokens` in `seqs`) should hold; more gain < `tolerance`.

        Grows by doubling until much larger batches than the efficient ones have been seen to be no better.
        """
        self._learn()
        curve = self._nearest_curve(_length_class(tokens, seqs), trusted=True)
        knee = self._floor if curve is None else curve.knee
        every = _PROBE_EARLY if self._observed < _PROBE_EVERY else _PROBE_EVERY
        probing = self._observed % every >= every - _PROBES
        return max(self._floor, min(2 * knee if probing else knee, self._ceiling))

    @property
    def tokens_per_s(self) -> float:
        """The measured rate of recent steps; 0.0 before the first."""
        self._learn()
        return self._mean_tokens / self._mean_ms * 1e3 if self._mean_ms else 0.0

    def _learn(self) -> None:
        for tokens, seqs, ms in self._unlearned:
            if self._cell(tokens, seqs).add(tokens, ms):
                self._curves.clear()
            self._observed += 1
            weight = _RATE_WEIGHT if self._mean_ms else 1.0
            self._mean_tokens += weight * (tokens - self._mean_tokens)
            self._mean_ms += weight * (ms - self._mean_ms)
        self._unlearned.clear()

    def _cell(self, tokens: int, seqs: int) -> _Cell:
        cells = self._classes.setdefault(_length_class(tokens, seqs), {})
        half_octave = int(2 * log2(tokens))
        cell = cells.get(half_octave)
        if cell is None:
            cell = cells[half_octave] = _Cell()
        return cell

    def _nearest_curve(self, length_class: int, *, trusted: bool) -> _Curve | None:
        """The curve of the class nearest to `length_class` that has one."""
        key = (length_class, trusted)
        if key not in self._curves:
            self._curves[key] = None
            for known in sorted(self._classes, key=lambda known: abs(known - length_class)):
                cells = [cell for cell in self._classes[known].values() if cell.trusted or not trusted]
                if cells:
                    self._curves[key] = _Curve(cells, self._tolerance, self._ceiling)
                    break
        return self._curves[key]

    def __repr__(self) -> str:
        self._learn()
        known = sum(len(cells) for cells in self._classes.values())
        return f"<CostModel {known} cells from {self._observed} steps, {self.tokens_per_s:.0f} tokens/s>"


def _length_class(tokens: int, seqs: int) -> int:
    return max(1, tokens // seqs).bit_length()
