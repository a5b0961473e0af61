"""Where the server listens: its flags, the options they make, and the port that those open."""

from __future__ import annotations

import argparse
import errno
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gateway.startup import Port, listen_at, listen_on, tls_context

Group: TypeAlias = "argparse._ArgumentGroup"


class ListenError(Exception):
    """The place cannot be listened at; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """One place.

    port: 0 takes a free one. uds: a unix socket, instead of host and port.
    tls_cert, tls_key: PEM files; tls_cert None: plain HTTP; tls_key None: it is in tls_cert.

    Raises:
        ValueError: there is no such port, or a key without a certificate.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"argument --port: {self.port} is not in 0..65535")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("argument --tls-key: there is no --tls-cert")


def add_flags(group: Group) -> None:
    """An address or a unix socket, and in the open or not."""
    defaults = ListenOptions()
    group.add_argument(
        "--host", default=defaults.host, help="address; 0.0.0.0 lets other machines in; default: %(default)s"
    )
    group.add_argument(
        "--port",
        metavar="N",
        type=int,
        default=defaults.port,
        help="0 takes a free one; default: %(default)s",
    )
    group.add_argument(
        "--uds", metavar="PATH", type=Path, help="listen at this unix socket, and not on --host and --port"
    )
    group.add_argument(
        "--tls-cert",
        metavar="PATH",
        type=_readable,
        help="PEM file with the certificate and its chain: speak HTTPS only; default: HTTP",
    )
    group.add_argument(
        "--tls-key",
        metavar="PATH",
        type=_readable,
        help="PEM file with its key; default: it is in --tls-cert",
    )


def listen_options(args: argparse.Namespace) -> ListenOptions:
    """What the parsed flags say.

    Raises:
        ValueError: see ListenOptions.
    """
    return ListenOptions(
        host=args.host, port=args.port, uds=args.uds, tls_cert=args.tls_cert, tls_key=args.tls_key
    )


def take_port(options: ListenOptions) -> Port:
    """The place, taken before anything slow is done.

    Raises:
        ListenError: the address is in use or not to be had, or the certificate cannot be used.
    """
    tls = _tls(options)
    where = f"{options.host}:{options.port}" if options.uds is None else str(options.uds)
    try:
        if options.uds is None:
            return Port(listen_on(options.host, options.port), tls)
        return Port(listen_at(str(options.uds)), tls)
    except OSError as error:
        reason = (
            "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror or error
        )
        another = "--port or --host" if options.uds is None else "--uds"
        raise ListenError(f"cannot listen on {where}: {reason}; choose another {another}") from error


def _readable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path, os.R_OK):  # not by opening it: a pipe gives what it has but once
        raise argparse.ArgumentTypeError(f"cannot read {text}")
    return path


def _tls(options: ListenOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None:
        return None
    try:
        return tls_context(options.tls_cert, options.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise ListenError(f"cannot use --tls-cert {options.tls_cert}: {error}") from error
