"""Which layers see only a window, and how each kind rotates, in transformers' two spellings."""

from __future__ import annotations

from collections.abc import Sequence

from rose.configs.fields import Fields


def local_layers(fields: Fields, default: Sequence[bool]) -> list[bool]:
    """Of each layer, whether it has a window: from layer_types, else `default`."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return list(default)
    known = {"sliding_attention": True, "full_attention": False}
    names = [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []
    if kinds != names or len(names) != len(default) or not known.keys() >= set(names):
        raise fields.refuse(f"layer_types must be {len(default)} of {', '.join(known)}")
    return [known[name] for name in names]


def rope_thetas(fields: Fields, full: tuple[str, float], sliding: tuple[str, float]) -> tuple[float, float]:
    """Bases of the layers without and with a window. full, sliding: the old key and its default."""
    if fields.get("rope_scaling") is not None:
        raise fields.refuse(f"rope_scaling {fields.get('rope_scaling')!r} is not supported")
    parameters = fields.rope_parameters()
    thetas = [
        fields.rope_entry(parameters.inside(parameters.get(kind) or {}, f"rope_parameters.{kind}"), *old)
        for kind, old in (("full_attention", full), ("sliding_attention", sliding))
    ]
    return thetas[0], thetas[1]
