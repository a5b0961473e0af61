"""The aiohttp application: which route is where, and the answers for places and methods that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from aiohttp import hdrs, web

from gateway.auth import KeyRing
from gateway.errors import ApiError, ErrorKind
from gateway.exchange import Door, Handler, refuse
from gateway.options import GatewayOptions
from gateway.pipeline import Pipeline, Scheduler
from gateway.routes import health, models, openai
from gateway.tokenization.base import Tokenizer
from gateway.tokenization.pool import TokenizerPool
from rose.batch import EngineInfo

HEALTH = web.AppKey("health", health.Health)


def create_app(
    options: GatewayOptions,
    scheduler: Scheduler,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    *,
    describe: Callable[[], Mapping[str, object]] = dict,
) -> web.Application:
    """The gateway in front of a started `scheduler`; see `gateway.listener.listen` for how to serve it.

    tokenizer: None for token ids only. describe: what /info says besides the model and the limits.
    Set `app[HEALTH].draining = True` when a shutdown begins.

    There is no middleware: one costs every request, and the unknown paths and methods that would need it are
    served by routes of their own.
    """
    app = web.Application(client_max_size=options.max_body_bytes)
    names = options.served_model_names or (info.model,)
    door = Door(KeyRing(options.api_keys), options.max_body_bytes)
    pool = _pool(app, options, tokenizer)
    pipeline = Pipeline(options, scheduler, info, pool)
    app[HEALTH] = health.Health(scheduler)
    _route(app, hdrs.METH_POST, openai.PATHS, door.work(openai.OpenAIEmbeddings(pipeline, names)))
    _route(app, hdrs.METH_GET, (models.PATH,), door.keyed(models.Models(names, info)))
    _route(app, hdrs.METH_GET, (health.INFO_PATH,), door.keyed(health.Info(info, options, names, describe)))
    _route(app, hdrs.METH_GET, (health.HEALTH_PATH,), door.open(app[HEALTH].live))
    _route(app, hdrs.METH_GET, (health.READY_PATH,), door.open(app[HEALTH].ready))
    app.router.add_route(hdrs.METH_ANY, "/{path:.*}", _not_found)
    return app


def _pool(app: web.Application, options: GatewayOptions, tokenizer: Tokenizer | None) -> TokenizerPool | None:
    if tokenizer is None:
        return None
    pool = TokenizerPool(tokenizer, options.tokenizer_threads, options.inline_text_chars)

    async def close(_: web.Application) -> None:
        pool.close()

    app.on_cleanup.append(close)
    return pool


def _route(app: web.Application, method: str, paths: Iterable[str], handler: Handler) -> None:
    """Serve `method` (and HEAD beside GET) at `paths`; other methods get 405, OPTIONS what is allowed."""
    allowed = (method, hdrs.METH_HEAD) if method == hdrs.METH_GET else (method,)
    fallback = _other_method(", ".join((*allowed, hdrs.METH_OPTIONS)))
    for path in paths:
        for name in allowed:
            app.router.add_route(name, path, handler)
        app.router.add_route(hdrs.METH_ANY, path, fallback)


def _other_method(allow: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == hdrs.METH_OPTIONS:
            return web.Response(status=204, headers={hdrs.ALLOW: allow})
        message = f"{request.path} takes {allow}, not {request.method}"
        headers = ((str(hdrs.ALLOW), allow),)
        return refuse(request, ApiError(ErrorKind.METHOD_NOT_ALLOWED, message, headers=headers))

    return answer


async def _not_found(request: web.Request) -> web.StreamResponse:
    return refuse(request, ApiError(ErrorKind.NOT_FOUND, f"there is nothing at {request.path}"))
