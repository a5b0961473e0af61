"""Search these documents by meaning, through a running server; and draw a map of them.

python docs/examples/search.py "are pickle files of a model executed?" --map map.png

Needs numpy; the map also needs matplotlib and scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np

DOCS = Path(__file__).resolve().parents[1]
LEAST_CHARS = 80
# Fenced code, comments and anchors; where a paragraph or an item of a list begins.
SKIPPED = re.compile(r"^```.*?^```|<!--.*?-->|<a .*?</a>", re.MULTILINE | re.DOTALL)
BORDER = re.compile(r"\n\s*\n|\n(?=- |\d+\. )")


class Passage(NamedTuple):
    """A paragraph. page: its file's name; heading: what it stands under."""

    page: str
    heading: str
    text: str


def read_passages(folder: Path) -> list[Passage]:
    """Every paragraph and item of a list of the folder's Markdown pages; tables and code are left out."""
    found = []
    for path in sorted(folder.glob("*.md")):
        heading = ""
        for block in BORDER.split(SKIPPED.sub("", path.read_text())):
            if title := re.match(r"\s*#+ (.*)", block):
                heading = title[1]
            elif (text := plain(block)) and not block.lstrip().startswith(("|", "![")):
                found.append(Passage(path.stem, heading, text))
    return found


def plain(block: str) -> str:
    """A block's words, without Markdown's marks; "" if they are few."""
    words = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", block)
    text = " ".join(re.sub(r"^\s*(- |\d+\. )|[`*]", "", words).split())
    return text if len(text) >= LEAST_CHARS else ""


def embed(url: str, texts: list[str]) -> np.ndarray:
    """f32[n, dim], of length 1, in one request; what is longer than the model takes is cut."""
    body = {"input": texts, "encoding_format": "bytes", "truncate": True, "normalize": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/embeddings", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return np.frombuffer(answer.read(), "<f4").reshape(len(texts), -1)


def draw(path: Path, query: str, passages: list[Passage], vectors: np.ndarray, best: np.ndarray) -> None:
    """A point a passage, coloured by page, like ones together; a star for the question, rings for `best`.

    vectors: f32[1 + n, dim], the question's first.
    """
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    asked, *rest = TSNE(metric="cosine", init="pca", perplexity=20, random_state=0).fit_transform(vectors)
    points = np.array(rest)
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    pages = sorted({passage.page for passage in passages})
    groups = [points[[passage.page == page for passage in passages]] for page in pages]
    places = apart(np.array([np.median(group, 0) for group in groups]), np.ptp(points, 0) * (0.2, 0.04))
    for number, (page, group, place) in enumerate(zip(pages, groups, places, strict=True)):
        color = f"C{number % 10}"
        axes.scatter(group[:, 0], group[:, 1], s=14, color=color, alpha=0.6, marker="os^D"[number // 10])
        box = {"color": "white", "alpha": 0.7, "pad": 1}
        axes.annotate(page, place, color=color, ha="center", va="center", weight="bold", bbox=box)
    axes.scatter(*points[best].T, s=110, facecolors="none", edgecolors="black")
    axes.scatter(*asked, s=220, marker="*", color="black")
    title = f"{len(passages)} paragraphs of docs/; \u2605 {query}"
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=11, wrap=True)
    figure.savefig(path, dpi=100)


def apart(places: np.ndarray, size: np.ndarray) -> np.ndarray:
    """[n, 2], moved down where labels of `size` (width, height) would cover each other."""
    placed: list[np.ndarray] = []
    for index in np.argsort(-places[:, 1]):
        while any((abs(places[index] - other) < size).all() for other in placed):
            places[index, 1] -= size[1] / 4
        placed.append(places[index])
    return places


def main() -> None:
    """Print the best passages, best first."""
    parser = argparse.ArgumentParser(description="Search these documents by meaning.")
    parser.add_argument("query", help="what to look for, in words")
    parser.add_argument("--url", default="http://localhost:8000", help="the server; default: %(default)s")
    parser.add_argument("--top", type=int, default=3, help="passages to print; default: %(default)s")
    parser.add_argument("--map", type=Path, metavar="FILE.png", help="draw the passages there")
    args = parser.parse_args()
    passages = read_passages(DOCS)
    texts = [f"{passage.heading}: {passage.text}" for passage in passages]
    try:
        vectors = embed(args.url, [args.query, *texts])
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {args.url} answered {error.code}: {error.read().decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"error: no server at {args.url}: {error}")
    scores = vectors[1:] @ vectors[0]
    best = np.argsort(-scores)[: args.top]
    for index in best:
        page, heading, text = passages[index]
        print(f"{scores[index]:.3f}  {page}.md, {heading}\n       {text[:300]}\n")
    if args.map:
        draw(args.map, args.query, passages, vectors, best)


if __name__ == "__main__":
    main()
