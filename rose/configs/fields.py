"""Typed reading of configuration files: a refusal is one line that names the file, the key and the value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ModelLoadError

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Fields:
    """The object in a JSON file, or one inside it. path: what messages call it."""

    path: Path
    values: Json

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Read the file.

        Raises:
            ModelLoadError: it is missing or damaged, or holds no object; as for every refusal here.
        """
        values = read_json(path)
        if not isinstance(values, dict):
            raise ModelLoadError(f"{path}: not a JSON object")
        return cls(path, values)

    def get(self, key: str, default: object = None) -> object:
        """The value as it stands there."""
        return self.values.get(key, default)

    def refuse(self, reason: str) -> ModelLoadError:
        """The error to raise."""
        return ModelLoadError(f"{self.path}: {reason}")

    def require(self, key: str, only: object) -> None:
        """Refuse any value of `key` but `only`, which is also what an absent key means."""
        if self.get(key, only) not in (only, None):
            raise self.refuse(f"{key} {self.values[key]!r} is not supported; only {only!r} is")

    def number(self, key: str, default: float | None = None) -> float:
        """A number; null counts as absent."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            found = "missing" if value is None else repr(value)
            raise self.refuse(f"{key} is {found}; a number is needed")
        try:
            return float(value)
        except OverflowError:
            raise self.refuse(f"{key} has too many digits") from None

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.number(key, default)
        if not (least <= value < math.inf and value == int(value)):
            raise self.refuse(f"{key} is {value:g}; a whole number of at least {least} is needed")
        return int(value)

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        """hidden_size / num_heads, which must be whole."""
        if hidden_size % num_heads:
            raise self.refuse(f"hidden_size {hidden_size} is no multiple of {num_heads} heads")
        return hidden_size // num_heads

    def rope_parameters(self) -> Fields:
        """What is under rope_parameters (transformers 5) or rope_scaling; an empty object if neither is."""
        found = [value for key in ("rope_parameters", "rope_scaling") if (value := self.get(key))]
        if len(found) == 2 and found[0] != found[1]:
            # transformers takes rope_scaling and forgets the rope_theta of the other.
            raise self.refuse("rope_parameters and rope_scaling differ; rope_parameters alone is enough")
        return self.inside(found[0] if found else {}, "rope_parameters")

    def inside(self, value: object, name: str) -> Fields:
        """`value`, which stands in this file, as Fields."""
        if not isinstance(value, dict):
            raise self.refuse(f"{name} is not an object")
        return Fields(self.path, value)

    def rope_type(self) -> str:
        """Of such parameters, in both spellings. All of a head must turn."""
        self.require("partial_rotary_factor", 1.0)
        return str(self.get("rope_type", self.get("type", "default")))

    def rope_theta(self, default: float = 10000.0) -> float:
        """The base, from either spelling; scaled variants (YaRN, linear) are refused."""
        return self.rope_entry(self.rope_parameters(), "rope_theta", default)

    def rope_entry(self, parameters: Fields, key: str, default: float) -> float:
        """The base that `parameters` name, else the one at `key` of this file, else `default`."""
        if (kind := parameters.rope_type()) != "default":
            raise self.refuse(f"rope_type {kind!r} is not supported for this architecture; 'default' is")
        return parameters.number("rope_theta", self.number(key, default))

    def max_model_len(self, max_positions: int) -> int:
        """The least of `max_positions` and what sentence_bert_config.json and the tokenizer declare."""
        limits = [max_positions]
        folder = self.path.parent
        for name, key in (
            ("sentence_bert_config.json", "max_seq_length"),
            ("tokenizer_config.json", "model_max_length"),
        ):
            if (folder / name).is_file():
                limits.append(Fields.read(folder / name).integer(key, max_positions))
        return min(limits)


def read_json(path: Path) -> object:
    """Whatever the file holds.

    Raises:
        ModelLoadError: it is missing or damaged.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing: not a model folder in Hugging Face layout") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from None
