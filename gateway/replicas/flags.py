"""The command-line flags of replicas and the options they make. Reads no argv itself."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from gateway.replicas.endpoints import read_file, read_url
from gateway.replicas.options import ReplicaOptions

Group: TypeAlias = "argparse._ArgumentGroup"

KEY_VARIABLE = "BOUQUET_REPLICA_API_KEY"
# Made by the kernel module of NVIDIA's: whether "auto" is CUDA can be told without torch.
_NVIDIA = Path("/dev/nvidiactl")


def add_flags(group: Group) -> None:
    """Engines in other processes, here and elsewhere."""
    group.add_argument(
        "--replicas",
        metavar="N",
        type=int,
        help="start N engines, each in a process of its own, behind this server: on --device cuda:0 to "
        "cuda:N-1 if that is auto or cuda; --device cuda:0,cuda:1 does the same; what befalls a GPU ends its "
        "own process alone, which is started again; default: one engine, in this process",
    )
    group.add_argument(
        "--replica",
        metavar="URL",
        action="append",
        default=[],
        type=_url,
        help="another server of the same model that does a part of the work, like http://host:8000; a name "
        "stands for all of its addresses, which are looked up every 2 s; repeatable; default: none",
    )
    group.add_argument(
        "--replica-file",
        metavar="PATH",
        type=_file,
        help="more of them, one a line; the file is read again every 2 s; default: none",
    )
    group.add_argument(
        "--no-engine",
        action="store_true",
        help="replicas alone do the work; else the model is loaded here as well, in a process of its own",
    )
    group.add_argument(
        "--replica-api-key",
        metavar="KEY",
        help=f"what those servers want as `Authorization: Bearer KEY`; also as {KEY_VARIABLE}; default: none",
    )
    group.add_argument("--replica-of", metavar="PID", type=int, help=argparse.SUPPRESS)


def replica_options(args: argparse.Namespace, environ: Mapping[str, str]) -> ReplicaOptions | None:
    """What the parsed flags say, --device among them; None: the engine is in this process.

    Raises:
        ValueError: they contradict each other.
    """
    devices = tuple(part.strip() for part in args.device.split(","))
    several = len(devices) > 1 or args.replicas is not None
    if args.no_engine and several:
        raise ValueError("--no-engine: there is no engine to have --replicas or several --device of")
    elsewhere = bool(args.replica or args.replica_file)
    if not (several or elsewhere or args.no_engine):
        return None
    key = (args.replica_api_key or environ.get(KEY_VARIABLE) or "").strip() or None
    if key is not None and not key.isprintable():
        raise ValueError(
            f"--replica-api-key, or {KEY_VARIABLE}, has a line break or another control character"
        )
    mine = () if args.no_engine else _spread(devices, args.replicas)
    return ReplicaOptions(tuple(dict.fromkeys(args.replica)), args.replica_file, mine, key)


def _spread(devices: tuple[str, ...], count: int | None) -> tuple[str, ...]:
    """A device for each of `count` engines; None: one on each device."""
    if count is None:
        return devices
    if count < 1:
        raise ValueError(f"argument --replicas: {count} is not a whole number of at least 1")
    if len(devices) > 1:
        if len(devices) != count:
            raise ValueError(f"argument --replicas: {count}, but --device names {len(devices)}")
        return devices
    device = devices[0]
    if device == "auto":
        device = "cuda" if _NVIDIA.exists() else "cpu"
    return tuple(f"cuda:{index}" for index in range(count)) if device == "cuda" else (device,) * count


def _url(text: str) -> str:
    try:
        return read_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(text: str) -> Path:
    try:
        path = Path(text).expanduser()
        read_file(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error}") from None
    return path
