"""The command-line flags of `corpus` and the options they make. Reads no argv itself, and no pyarrow."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from gateway.corpus.capacity import Question
from gateway.corpus.capacity_report import models, report, table
from gateway.corpus.options import (
    DISTANCES,
    FORMATS,
    VECTOR_TYPES,
    CorpusOptions,
    QdrantOptions,
    RayOptions,
)

QDRANT_KEY_VARIABLE = "QDRANT_API_KEY"
_DEFAULTS = CorpusOptions("", "")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """IN, OUT and what is made of a row."""
    parser.add_argument(
        "source",
        metavar="IN",
        nargs="?",
        help="a .parquet or .jsonl file (.jsonl.gz, .jsonl.zst), a folder of such, a pattern, or a URL "
        "(s3://, gs://, or any that fsspec knows)",
    )
    parser.add_argument(
        "out",
        metavar="OUT",
        nargs="?",
        help="folder or URL for the vectors; a rerun does what is missing there",
    )
    _add_row_flags(parser.add_argument_group("rows"))
    _add_job_flags(parser.add_argument_group("the job"))
    _add_qdrant_flags(parser.add_argument_group("Qdrant"))
    _add_ray_flags(parser.add_argument_group("a Ray cluster"))
    _add_plan_flags(parser.add_argument_group("planning"))


def _add_row_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--text-column", metavar="NAME", default="text", help="default: %(default)s")
    group.add_argument(
        "--id-column", metavar="NAME", help="kept beside the vector; default: none, rows have file and number"
    )
    group.add_argument(
        "--vectors",
        choices=VECTOR_TYPES,
        default=_DEFAULTS.vectors,
        help="type of the values; int8: the model's own quantiser if it has one, else scaled a vector; bits: "
        "signs, eight to a uint8; default: %(default)s",
    )
    group.add_argument(
        "--dimensions", metavar="N", type=int, help="keep this many leading values; default: all"
    )
    group.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="vectors of length 1; default: as the model's own files say",
    )
    group.add_argument(
        "--input-type",
        metavar="TASK",
        help="its prompt goes before each text: document, query, ...; default: the "
        "model's default prompt, if it has one",
    )
    group.add_argument("--prompt-name", metavar="NAME", help="the prompt by the name that the model gives it")
    group.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    group.add_argument(
        "--truncate",
        choices=("off", "end", "start"),
        default=_DEFAULTS.truncate,
        help="which side of a text that is too long is cut; off: the row is rejected; default: %(default)s",
    )


def _add_job_flags(group: argparse._ArgumentGroup) -> None:
    counts = (
        (
            "--shard-rows",
            "N",
            _DEFAULTS.shard_rows,
            "rows of a shard, which is written and redone as a whole",
        ),
        ("--shard-bytes", "BYTES", _DEFAULTS.shard_bytes, "a shard is full at so much text, too"),
        (
            "--window-rows",
            "N",
            _DEFAULTS.window_rows,
            "rows sorted by length together; three times so many are held",
        ),
        ("--window-bytes", "BYTES", _DEFAULTS.window_bytes, "a window is full at so much text, too"),
        (
            "--tokenizer-threads",
            "N",
            _DEFAULTS.tokenizer_threads,
            "threads that tokenise ahead of the device",
        ),
    )
    for flag, metavar, default, consequence in counts:
        group.add_argument(
            flag,
            metavar=metavar,
            type=_positive,
            default=default,
            help=f"{consequence}; default: %(default)s",
        )
    group.add_argument(
        "--redo",
        action="store_true",
        help="embed all anew, also with another model, type or column than before; OUT's vectors are "
        "removed, points that an earlier run wrote to Qdrant are not: delete its collection first",
    )
    group.add_argument(
        "--refuse-duplicate-ids",
        action="store_true",
        help="read all ids first and embed nothing if one comes twice; default: keep and count them",
    )
    group.add_argument(
        "--format",
        choices=FORMATS,
        default=_DEFAULTS.format,
        help="parquet: parts in OUT; lance: a table, OUT/vectors.lance, once all is done; none: nothing, "
        "--qdrant has the vectors; default: %(default)s",
    )
    group.add_argument("--summary", metavar="PATH", help="write the summary there, too")


def _add_qdrant_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--qdrant", metavar="URL", help="vectors go to this server of Qdrant, too, like http://host:6333"
    )
    group.add_argument(
        "--qdrant-collection", metavar="NAME", help="made if it is not there; else it must have the same size"
    )
    group.add_argument(
        "--qdrant-distance", choices=DISTANCES, help="default: what the collection has, cosine for a new one"
    )
    group.add_argument(
        "--qdrant-api-key", metavar="KEY", help=f"also as {QDRANT_KEY_VARIABLE}; default: none"
    )


def _add_ray_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ray-address",
        metavar="local|auto|HOST:PORT",
        help="run the shards as actors of Ray Data: local starts a cluster here, auto finds one; IN and OUT "
        "must be the same on all nodes; default: this process alone",
    )
    group.add_argument(
        "--actors", metavar="N", type=_positive, help="default: as many as the cluster has room for"
    )
    group.add_argument("--gpus-per-actor", metavar="N", type=float, help="default: 1, or 0 with --device cpu")
    group.add_argument("--cpus-per-actor", metavar="N", type=float, default=1.0, help="default: %(default)s")


def _add_plan_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--plan",
        metavar="ROWS",
        type=_count,
        help="embed nothing; say what so many rows (1e9) would take, from measured figures: a table, or with "
        "--tokens all about --model",
    )
    group.add_argument("--tokens", metavar="N", type=_count, help="of a row, on average")
    group.add_argument("--gpus", metavar="N", type=_positive, help="default: as many as --days need")
    group.add_argument("--days", metavar="N", type=_count, default=30.0, help="default: %(default)g")
    group.add_argument(
        "--gpu-hour-dollars", metavar="PRICE", type=_count, default=3.0, help="default: %(default)g"
    )


def planned(args: argparse.Namespace) -> str:
    """What --plan answers.

    Raises:
        ValueError: the model was not measured.
    """
    question = Question(
        rows=args.plan,
        tokens=args.tokens or 1.0,
        model=args.model,
        gpus=args.gpus,
        days=args.days,
        dollars=args.gpu_hour_dollars,
        shard_rows=args.shard_rows,
        shard_bytes=args.shard_bytes,
    )
    if args.tokens is None:
        return table(question)
    if args.model not in models():
        raise ValueError(f"--plan knows {', '.join(models())}; --model is {args.model}")
    return report(question)


def corpus_options(args: argparse.Namespace, environ: Mapping[str, str]) -> CorpusOptions:
    """What the parsed flags say, and QDRANT_API_KEY.

    Raises:
        ValueError: IN or OUT is missing, or flags contradict each other.
    """
    if args.source is None or args.out is None:
        raise ValueError("IN and OUT are needed (or --plan)")
    given = [name for name in ("input_type", "prompt_name", "prompt") if getattr(args, name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join('--' + name.replace('_', '-') for name in given)}: give one of them")
    if args.refuse_duplicate_ids and args.id_column is None:
        raise ValueError("--refuse-duplicate-ids needs --id-column")
    if args.summary is not None and not Path(args.summary).absolute().parent.is_dir():
        raise ValueError(f"--summary {args.summary}: no such folder")
    given_fields = {name: getattr(args, name) for name in CorpusOptions.__slots__ if hasattr(args, name)}
    return CorpusOptions(**given_fields | {"qdrant": _qdrant_options(args, environ)})


def _qdrant_options(args: argparse.Namespace, environ: Mapping[str, str]) -> QdrantOptions | None:
    """Raises ValueError: half of what is needed, or vectors that Qdrant does not take."""
    url, collection = args.qdrant, args.qdrant_collection
    if (url is None) != (collection is None):
        raise ValueError("--qdrant and --qdrant-collection go together")
    if url is None:
        if args.format == "none":
            raise ValueError("--format none: the vectors would be nowhere; it needs --qdrant")
        return None
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--qdrant {url}: not a URL like http://host:6333")
    if not collection or "/" in collection:
        raise ValueError(f"--qdrant-collection {collection!r} is no collection's name")
    if args.vectors == "bits":
        raise ValueError("--qdrant takes no --vectors bits; its own binary quantization makes them")
    key = (args.qdrant_api_key or environ.get(QDRANT_KEY_VARIABLE) or "").strip() or None
    return QdrantOptions(url, collection, args.qdrant_distance, key)


def ray_options(args: argparse.Namespace) -> RayOptions | None:
    """Where the cluster is; None: there is none."""
    if args.ray_address is None:
        return None
    gpus = args.gpus_per_actor
    if gpus is None:
        gpus = 0.0 if args.device == "cpu" else 1.0
    return RayOptions(args.ray_address, args.actors, gpus, args.cpus_per_actor)


def _count(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-18 <= value <= 1e18:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1e-18 to 1e18")
    return value


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value
