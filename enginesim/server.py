"""The HTTP application of one engine: which handler answers what, and the border where errors become answers."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from enginesim.admin import Admin
from enginesim.api_errors import ApiError
from enginesim.completions import Completions
from enginesim.faults import Faults
from enginesim.messages import Messages
from enginesim.pages import Pages
from enginesim.sglang_pages import SglangPages

BODY_MAX_BYTES = 256 << 20
ENGINE_NAME_HEADER = "x-engine-name"
MESSAGES_PATH = "/v1/messages"
_GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", MESSAGES_PATH})
_ADMIN_PREFIX = "/sim/"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    completions: Completions, pages: Pages | SglangPages, admin: Admin, faults: Faults, name: str | None = None
) -> web.Application:
    """All routes; `name`, if given, goes out in `x-engine-name` with every answer."""
    app = web.Application(client_max_size=BODY_MAX_BYTES, middlewares=[_answer_errors, _strike_with(faults)])
    messages = Messages(completions)
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat),
            web.post("/v1/completions", completions.text),
            web.post(MESSAGES_PATH, messages.create),
            web.post("/tokenize", completions.tokenize),
            *pages.routes(),
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
        body = error.anthropic_body() if request.path == MESSAGES_PATH else error.body()
        return web.Response(status=error.status, body=body, content_type="application/json")
    except web.RequestPayloadError as error:
        # A content coding that is not what it says. Real engines do not decode bodies, and find no JSON in them.
        response = web.json_response({"detail": str(error)}, status=400)
        response.force_close()  # what is left of the body cannot be told from another request
        return response
    except web.HTTPException as error:
        # A path or method that does not exist, a body too large: FastAPI's shape, in which vLLM answers these.
        return web.json_response({"detail": error.reason}, status=error.status)


def _strike_with(faults: Faults) -> Any:  # noqa: ANN401 - aiohttp has no public type for a middleware
    @web.middleware
    async def strike(request: web.Request, handler: Handler) -> web.StreamResponse:
        everywhere = faults.now.everywhere and not request.path.startswith(_ADMIN_PREFIX)
        if everywhere or request.path in _GENERATING_PATHS:
            await faults.strike(request)
        return await handler(request)

    return strike
