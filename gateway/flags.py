"""The command-line flags of the HTTP side and the options they make. Reads no argv itself."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from gateway.options import GatewayOptions

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

# Field of GatewayOptions, which names the flag and has its default; unit; consequence.
_LIMITS = (
    ("max_items", "N", "inputs in one request; more get 400"),
    ("max_request_tokens", "TOKENS", "tokens of all inputs of one request; more get 400"),
    ("max_body_bytes", "BYTES", "one request's body, decompressed; more get 413"),
    (
        "request_timeout_s",
        "SECONDS",
        "a request that is not started on the device by then, counted from its head, gets 504, and what "
        "of it still waits is not computed; the header x-request-timeout-ms may ask for less",
    ),
    (
        "max_outstanding_requests",
        "N",
        "requests under way at once, from head to answer; more get 429 before their body is read",
    ),
    (
        "max_outstanding_token_bytes",
        "BYTES",
        "what the tokens of all requests under way may give, as float32; more get 429",
    ),
    ("head_timeout_s", "SECONDS", "a request whose head has begun and not ended by then gets 408"),
    ("body_timeout_s", "SECONDS", "a body that has not come by then, from the end of its head, gets 408"),
    (
        "keepalive_timeout_s",
        "SECONDS",
        "a connection on which nothing comes, or nothing of an answer is taken, for so long is closed; "
        "should be more than the load balancer's own, so that no request meets a closing connection",
    ),
    ("perplexity_max_items", "N", "--max-items of requests in Perplexity's dialect"),
    ("perplexity_max_request_tokens", "TOKENS", "--max-request-tokens of requests in Perplexity's dialect"),
    ("tokenizer_threads", "N", "threads that tokenise long texts beside the event loop"),
)

Group: TypeAlias = "argparse._ArgumentGroup"


def add_http_flags(group: Group) -> None:
    """Who may ask, for which names, in which dialect; where traces go, and which tokenizer serves."""
    _add_access_flags(group)
    group.add_argument(
        "--no-dashboard",
        dest="dashboard",
        action="store_false",
        help="no page for people at /; default: there is one, whose numbers want a key where work does",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send a trace of every request to this OpenTelemetry collector, by OTLP over HTTP, e.g. "
        "http://localhost:4318; needs the extra `otel`; default: where the OTEL_* variables say, or none",
    )
    group.add_argument(
        "--api-dialect",
        choices=("openai", "perplexity"),
        default=GatewayOptions().api_dialect,
        help="what /v1/embeddings answers when a request names no encoding_format: floats and OpenAI's "
        "errors, or base64_int8 and Perplexity's; default: %(default)s",
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        type=_tokenizer_file,
        help="a tokenizer.json, or a folder with one, instead of the model's own; with neither the server "
        "takes token ids only",
    )


def _add_access_flags(group: Group) -> None:
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        default=[],
        help="a name that requests may give as `model`; answers show it, or the first for a request "
        "that gives none; repeatable; default: --model",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="work routes want one of these keys as `Authorization: Bearer KEY`; /health and /ready stay "
        "open; repeatable; who can list processes can read flags, but not BOUQUET_API_KEY; default: none",
    )
    group.add_argument(
        "--api-key-file",
        metavar="PATH",
        type=_key_file,
        default=(),
        help="more of them, one a line; empty lines and lines that begin with # do not count; default: none",
    )
    group.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="pages of this origin (https://host) may use the server from a browser; * for any; repeatable; "
        "default: none",
    )


def add_limit_flags(group: Group) -> None:
    """What one request may ask for."""
    defaults = GatewayOptions()
    for name, unit, consequence in _LIMITS:
        default = getattr(defaults, name)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            metavar=unit,
            type=type(default),
            default=default,
            help=f"{consequence}; default: %(default)s",
        )


def gateway_options(args: argparse.Namespace, more_keys: Sequence[str]) -> GatewayOptions:
    """What the parsed flags of both groups say; more_keys: API keys from elsewhere.

    Raises:
        ValueError: a limit is not positive, or a key or name is empty.
    """
    return GatewayOptions(
        served_model_names=tuple(args.served_model_name),
        api_keys=(*args.api_key, *args.api_key_file, *more_keys),
        api_dialect=args.api_dialect,
        cors_origins=tuple(args.cors_origin),
        dashboard=args.dashboard,
        **{name: getattr(args, name) for name, _, _ in _LIMITS},
    )


def traces_endpoint(args: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """Where traces go: a collector's URL; "": where the OTEL_* variables say; None: there are none.

    Raises:
        ValueError: the flag gives no URL.

    Source: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
    """
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").lower()
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return None
    if args.otlp_endpoint:
        endpoint: str = args.otlp_endpoint
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"argument --otlp-endpoint: {endpoint!r} is no URL like http://localhost:4318")
        return endpoint
    return "" if exporter == "otlp" or any(environ.get(name) for name in _ENDPOINTS) else None


def _key_file(text: str) -> tuple[str, ...]:
    try:
        lines = Path(text).expanduser().read_text().splitlines()
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # the second: "~" of nobody
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:  # else a file that was emptied by mistake would open the server to everyone
        raise argparse.ArgumentTypeError(f"{text} has no key in it")
    return keys


def _tokenizer_file(text: str) -> Path:
    try:
        path = Path(text).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        if path.is_file():
            return path
    except (OSError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error}") from error
    raise argparse.ArgumentTypeError(f"there is no file {path}")
