"""The HTTP application of one engine: which handler answers what, and the border where errors become answers."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from enginesim.admin import Admin
from enginesim.api_errors import ApiError
from enginesim.completions import Completions
from enginesim.pages import Pages

BODY_MAX_BYTES = 256 << 20
ENGINE_NAME_HEADER = "x-engine-name"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(completions: Completions, pages: Pages, admin: Admin, name: str | None = None) -> web.Application:
    """All routes; `name`, if given, goes out in `x-engine-name` with every answer."""
    app = web.Application(client_max_size=BODY_MAX_BYTES, middlewares=[_answer_errors])
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat),
            web.post("/v1/completions", completions.text),
            web.post("/tokenize", completions.tokenize),
            web.get("/v1/models", pages.models),
            web.get("/version", pages.version),
            web.get("/health", pages.health),
            web.get("/metrics", pages.metrics),
            web.get("/kv_event_sources", pages.kv_event_sources),
            web.get("/server_info", pages.server_info),
            web.post("/reset_prefix_cache", pages.reset_prefix_cache),
            *admin.routes(),
        ]
    )
    if name is not None:

        async def sign(http: web.Request, response: web.StreamResponse) -> None:
            response.headers[ENGINE_NAME_HEADER] = name

        app.on_response_prepare.append(sign)
    return app


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.Response(status=error.status, body=error.body(), content_type="application/json")
    except web.HTTPException as error:
        # A path or method that does not exist, a body too large: FastAPI's shape, in which vLLM answers these.
        return web.json_response({"detail": error.reason}, status=error.status)
