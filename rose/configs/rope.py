"""How a decoder rotates past the length it was trained for: the rope_parameters of its config.json.

Which frequencies a kind comes to is in `rose.kernels.frequencies`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rose.configs.fields import Fields


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Waves that turn fewer than low_turns times within `original_positions` divided by `factor`.

    Those that turn more than high_turns times stay, what lies between is mixed of both.
    """

    factor: float
    original_positions: int
    low_turns: float
    high_turns: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """As Llama's, but mixed by place among the frequencies, and cos and sin times attention_factor.

    slow_turns, fast_turns: of the first and the last that is mixed. truncate: whether their places are whole.
    """

    factor: float
    original_positions: int
    slow_turns: float
    fast_turns: float
    attention_factor: float
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """The base, what changes its frequencies, and the longest sequence in tokens."""

    theta: float
    scaling: RopeScaling | None
    max_positions: int


def read_rope(fields: Fields, max_positions: int) -> Rope:
    """From rope_parameters (transformers 5), or rope_scaling and rope_theta beside each other.

    max_positions: max_position_embeddings.

    Raises:
        ModelLoadError: the kind is unknown, or a number that it needs is missing.
    """
    parameters = fields.rope_parameters()
    kind = parameters.rope_type()
    theta = parameters.number("rope_theta", fields.number("rope_theta", 10000.0))
    if kind in ("default", "dynamic"):
        # Dynamic: past max_positions the angles depend on the longest sequence of the batch, on what else is
        # in it, so that is where we end. Up to there they are the plain ones.
        return Rope(theta, None, max_positions)
    if kind == "linear":
        return Rope(theta, LinearScaling(_factor(parameters)), max_positions)
    if kind == "llama3":
        return Rope(theta, _llama3(fields, parameters, max_positions), max_positions)
    if kind == "yarn":
        yarn = _yarn(fields, parameters, max_positions)
        # Model cards have the reader add YaRN and leave max_position_embeddings as it was.
        return Rope(theta, yarn, max(max_positions, int(yarn.original_positions * yarn.factor)))
    known = "default, dynamic, linear, llama3 and yarn"
    raise fields.refuse(f"rope_type {kind!r} is not supported; {known} are")


def _llama3(fields: Fields, parameters: Fields, max_positions: int) -> Llama3Scaling:
    low, high = (parameters.number(f"{end}_freq_factor") for end in ("low", "high"))
    if not 0 < low < high:
        raise fields.refuse(f"low_freq_factor {low:g} must be less than high_freq_factor {high:g}")
    return Llama3Scaling(_factor(parameters), _original(fields, parameters, max_positions), low, high)


def _yarn(fields: Fields, parameters: Fields, max_positions: int) -> YarnScaling:
    original = _original(fields, parameters, max_positions)
    factor = _factor(parameters, max_positions / original)
    fast, slow = parameters.number("beta_fast", 32.0), parameters.number("beta_slow", 1.0)
    if not 0 < slow <= fast:
        raise fields.refuse(f"beta_slow {slow:g} must be more than 0 and at most beta_fast {fast:g}")
    attention = parameters.number("attention_factor", _attention_factor(parameters, factor))
    return YarnScaling(factor, original, slow, fast, attention, parameters.get("truncate", True) is not False)


def _attention_factor(parameters: Fields, factor: float) -> float:
    """Source: Peng et al., YaRN, arXiv 2309.00071, equation 22; mscale as DeepSeek's models have it."""
    mscale, mscale_all = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    if not (mscale and mscale_all):
        mscale, mscale_all = 1.0, 0.0
    grown = 0.1 * math.log(factor)
    return (grown * mscale + 1.0) / (grown * mscale_all + 1.0)


def _factor(parameters: Fields, default: float | None = None) -> float:
    factor = parameters.number("factor", default)
    if not 1.0 <= factor < math.inf:
        raise parameters.refuse(f"rope factor {factor:g} is not a number of at least 1")
    return factor


def _original(fields: Fields, parameters: Fields, max_positions: int) -> int:
    """Tokens that the model was trained for; beside the parameters the key outweighs theirs."""
    key = "original_max_position_embeddings"
    return fields.integer(key, parameters.integer(key, max_positions))
