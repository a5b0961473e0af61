"""The aiohttp application: which route is where, and the answers for places and methods that are not."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from gateway.connection import CLIENT_PATIENCE, ClientPatience
from gateway.cors import allow_origins
from gateway.cross_encoder import CrossEncoder
from gateway.drain import DRAIN, Drain
from gateway.errors import ApiError, ErrorKind, ErrorShape
from gateway.exchange import (
    PLAIN_ROUTES,
    Answer,
    Call,
    Door,
    Handler,
    Page,
    PlainRoutes,
    Stream,
    Work,
)
from gateway.metrics import GatewayMetrics
from gateway.names import ServedNames
from gateway.options import GatewayOptions
from gateway.pipeline import Pipeline, Scheduler
from gateway.replicas.fleet import Fleet
from gateway.routes import (
    cohere,
    dashboard,
    docs,
    health,
    metrics,
    models,
    openai,
    perplexity,
    predict,
    rerank,
    score,
    sequences,
    tei,
    tei_tokens,
    tokens,
)
from gateway.scoring import BiEncoderScorer, Scorer
from gateway.strays import STRAYS, Strays, allowed
from gateway.templates import pair_template, text_tokenizer
from gateway.tokenization.base import Tokenizer
from gateway.tokenization.pool import TokenizerPool
from gateway.web.feed import Feed
from gateway.web.snapshot import Snapshot
from rose.batch import EngineInfo
from scheduler.admission import drain_s

if TYPE_CHECKING:  # for servers that trace only
    from gateway.tracing import Tracing

logger = logging.getLogger(__name__)


def create_app(
    options: GatewayOptions,
    scheduler: Scheduler,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    *,
    describe: Callable[[], Mapping[str, object]] = dict,
    engine_stats: Callable[[], Mapping[str, object]] = dict,
    fleet: Fleet | None = None,
    tracing: Tracing | None = None,
) -> web.Application:
    """The gateway in front of a started `scheduler`; see `gateway.listener.listen` for how to serve it.

    tokenizer: None for token ids only. describe: what /info says besides the model and the limits.
    engine_stats: what /metrics says of the engine; see Engine.stats. fleet: the replicas behind `scheduler`,
    if there are any. tracing: None: no traces.
    `await app[DRAIN].run(limit_s)` when a shutdown begins.

    There is no middleware: one costs every request, and the unknown paths and methods that would need it are
    served by routes of their own.
    """
    app = web.Application(client_max_size=options.max_body_bytes)
    names = ServedNames(options.served_model_names or (info.model,))
    counted = GatewayMetrics()
    drain = app[DRAIN] = Drain(counted)
    door = Door(options, counted, drain, lambda: drain_s(scheduler.metrics))
    pool = _pool(app, options, _texts_of(info, tokenizer), tracing)
    traced = scheduler if tracing is None else tracing.scheduler(scheduler)
    pipeline = Pipeline(options, traced, info, pool, counted)
    probes = health.Health(scheduler, drain, fleet)
    app[STRAYS] = Strays(counted)
    app[CLIENT_PATIENCE] = ClientPatience(options.head_timeout_s, options.keepalive_timeout_s)
    routes = _Routes(app, door)
    if tracing is not None:
        routes.wrapping = lambda path, work: tracing.work(path, names.names[0], work)
    _embeddings(routes, pipeline, names, options)
    _dialects(routes, pipeline, names, tokenizer)
    routes.post((sequences.PATH,), sequences.Sequences(pipeline))
    routes.get(models.PATH, models.Models(names.names, info))
    routes.get(health.INFO_PATH, health.Info(info, options, names.names, describe))
    routes.get(health.HEALTH_PATH, probes.live, keyed=False)
    routes.get(health.READY_PATH, probes.ready, keyed=False)
    page = metrics.Metrics(counted, lambda: scheduler.metrics, engine_stats, info, fleet)
    routes.get(metrics.PATH, page, keyed=False)
    _documents(routes)
    if options.dashboard:
        snapshot = Snapshot(
            counted,
            lambda: scheduler.metrics,
            engine_stats,
            info,
            work=routes.counted,
            names=names.names,
            text=tokenizer is not None,
            fleet=fleet,
        )
        feed = Feed(snapshot)
        drain.when_begun(feed.close)
        dashboard.add(routes, feed)
    routes.register()
    elsewhere = door.refusing(_not_found)
    app.router.add_route(hdrs.METH_ANY, "/{path:.*}", elsewhere, expect_handler=app[STRAYS].expectation)
    if options.cors_origins:
        allow_origins(app, options.cors_origins)
    else:  # those headers depend on more of a request than plain ones have
        app[PLAIN_ROUTES] = PlainRoutes(routes.plain, options.max_body_bytes)
    return app


def _embeddings(routes: _Routes, pipeline: Pipeline, names: ServedNames, options: GatewayOptions) -> None:
    """OpenAI's and Perplexity's, which share a path."""
    own = ErrorShape.PERPLEXITY if options.api_dialect == "perplexity" else ErrorShape.OPENAI
    pplx = perplexity.PerplexityEmbeddings(pipeline, options)
    routes.post(openai.PATHS, openai.OpenAIEmbeddings(pipeline, names, pplx), own)
    context = perplexity.ContextualizedEmbeddings(pipeline, names, options)
    routes.post((perplexity.CONTEXT_PATH,), context, ErrorShape.PERPLEXITY)


def _dialects(routes: _Routes, pipeline: Pipeline, names: ServedNames, tokenizer: Tokenizer | None) -> None:
    """What is not OpenAI's or Perplexity's."""
    scorer: Scorer
    similarity: Callable[[Call], Awaitable[Answer]]
    model = names.names[0]
    if pipeline.info.task == "score":
        scorer = CrossEncoder(pipeline, pair_template(pipeline.info, tokenizer))
        similarity = tei.unsupported(model, "cosines; it scores texts: /rerank, /score and /predict")
        routes.post((predict.PREDICT_PATH,), predict.Predict(pipeline, scorer), ErrorShape.TEI)
    else:
        scorer = BiEncoderScorer(pipeline)
        similarity = tei.Similarity(scorer)
        refusal = tei.unsupported(model, "classes; /embed gives vectors and /rerank scores")
        routes.post((predict.PREDICT_PATH,), refusal, ErrorShape.TEI)
    embed = tei.Embed(pipeline, model)
    routes.post((tei.EMBED_PATH,), embed, ErrorShape.TEI)
    routes.post((tei.SIMILARITY_PATH,), similarity, ErrorShape.TEI)
    routes.post((tei.ROOT_PATH,), tei.Root(embed, similarity), ErrorShape.TEI)
    outputs = pipeline.info.outputs
    of_tokens = tei_tokens.EmbedAll(pipeline, model) if "hidden" in outputs else None
    refusal = tei.unsupported(model, "a vector for each token; /embed gives one for each text")
    routes.post((tei_tokens.ALL_PATH,), of_tokens or refusal, ErrorShape.TEI)
    words = tei_tokens.EmbedSparse(pipeline) if "sparse" in outputs else None
    refusal = tei.unsupported(model, "sparse vectors; /embed gives dense ones")
    routes.post((tei_tokens.SPARSE_PATH,), words or refusal, ErrorShape.TEI)
    routes.post((tokens.TOKENIZE_PATH,), tokens.Tokenize(pipeline), ErrorShape.TEI)
    routes.post((tokens.DECODE_PATH,), tokens.Decode(pipeline), ErrorShape.TEI)
    for path, shape in rerank.PATHS.items():
        routes.post((path,), rerank.Rerank(scorer, names, shape), shape)
    routes.post(score.PATHS, score.Score(scorer, names))
    for path, version in ((cohere.V1_PATH, "1"), (cohere.V2_PATH, "2")):
        routes.post((path,), cohere.CohereEmbed(pipeline, names, version), ErrorShape.COHERE)


def _documents(routes: _Routes) -> None:
    """The API's description, for programs and for people."""
    routes.get(docs.SCHEMA_PATH, docs.schema, keyed=False)
    routes.get(docs.PATH, docs.page, keyed=False)
    for name in docs.FILES:
        routes.get(f"{docs.PATH}/{name}", docs.file(name), keyed=False)


def _texts_of(info: EngineInfo, tokenizer: Tokenizer | None) -> Tokenizer | None:
    """What tokenises texts for this model; warns if it may be another model's."""
    if tokenizer is None:
        return None
    if tokenizer.vocab_size > info.vocab_size:
        message = "the tokenizer gives ids up to %d, the model takes up to %d: is it this model's own?"
        logger.warning(message, tokenizer.vocab_size - 1, info.vocab_size - 1)
    return text_tokenizer(info, tokenizer)


def _pool(
    app: web.Application, options: GatewayOptions, tokenizer: Tokenizer | None, tracing: Tracing | None
) -> TokenizerPool | None:
    if tokenizer is None:
        return None
    make = TokenizerPool if tracing is None else tracing.pool
    pool = make(tokenizer, options.tokenizer_threads, options.inline_text_chars)

    async def close(_: web.Application) -> None:
        pool.close()

    app.on_cleanup.append(close)
    return pool


class _Routes:
    """Puts routes into an application. Other methods get 405, OPTIONS what is allowed.

    wrapping: what is put around the work of each route. counted: what those are counted as.
    """

    def __init__(self, app: web.Application, door: Door) -> None:
        self._app = app
        self._door = door
        self.wrapping: Callable[[str, Work], Work] = lambda _, work: work
        self.plain: dict[bytes, Work] = {}
        self.counted: set[str] = set()
        self._handlers: dict[str, dict[str, Handler]] = {}

    def post(
        self,
        paths: Iterable[str],
        route: Callable[[Call], Awaitable[Answer]],
        shape: ErrorShape = ErrorShape.OPENAI,
    ) -> None:
        """Work at `paths`, with a key; counted under the first of them."""
        paths = tuple(paths)
        work = self.wrapping(paths[0], self._door.work(paths[0], route, shape))
        handler = self._door.handler(work)
        self.counted.add(paths[0])
        for path in paths:
            self._add(path, (hdrs.METH_POST,), handler, shape)
            self.plain[path.encode()] = work

    def get(self, path: str, page: Callable[[], Answer], *, keyed: bool = True) -> None:
        """A page, and HEAD beside it."""
        handler = self._door.keyed(path, page) if keyed else self._door.open(path, page)
        self._add(path, (hdrs.METH_GET, hdrs.METH_HEAD), handler)

    def file(self, path: str, counted: str, page: Page) -> None:
        """A page for everyone that depends on a request's headers, and HEAD; counted as `counted`."""
        self._add(path, (hdrs.METH_GET, hdrs.METH_HEAD), self._door.file(counted, page))

    def stream(self, path: str, begin: Stream) -> None:
        """A page that never ends, with a key."""
        self._add(path, (hdrs.METH_GET,), self._door.stream(path, begin))

    def register(self) -> None:
        """Put all of it into the application; once, at the end."""
        strays = self._app[STRAYS]
        for path, handlers in self._handlers.items():
            allow = ", ".join((*handlers, hdrs.METH_OPTIONS))
            others = {
                hdrs.METH_OPTIONS: _options(allow),
                hdrs.METH_ANY: self._door.refusing(_wrong_method(allow, strays.shapes[path])),
            }
            for method, answer in (handlers | others).items():
                self._app.router.add_route(method, path, answer, expect_handler=strays.expectation)

    def _add(
        self, path: str, methods: tuple[str, ...], handler: Handler, shape: ErrorShape = ErrorShape.OPENAI
    ) -> None:
        """The first to name a path decides how its errors are told."""
        self._app[STRAYS].shapes.setdefault(path, shape)
        self._handlers.setdefault(path, {}).update(dict.fromkeys(methods, handler))


def _options(allow: str) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return allowed(request, allow)

    return answer


def _wrong_method(allow: str, shape: ErrorShape) -> Callable[[web.Request], ApiError]:
    def error(request: web.Request) -> ApiError:
        message = f"{request.path} takes {allow}, not {request.method}"
        refusal = ApiError(ErrorKind.METHOD_NOT_ALLOWED, message, headers=((str(hdrs.ALLOW), allow),))
        refusal.shape = shape
        return refusal

    return error


def _not_found(request: web.Request) -> ApiError:
    return ApiError(ErrorKind.NOT_FOUND, f"there is nothing at {request.path}")
