"""The FastAPI application: every route, and how errors become responses."""

import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from jaxllm.serve import chat, completions, responses, tokenize
from jaxllm.serve.admin import add_admin_routes, add_dev_routes
from jaxllm.serve.context import Context
from jaxllm.serve.errors import ApiError, bad_request, http_error, to_api_error, validation_error
from jaxllm.serve.middleware import ApiKeyMiddleware, BodyLimitMiddleware, CountMiddleware
from jaxllm.serve.protocol.base import ErrorBody
from jaxllm.serve.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from jaxllm.serve.protocol.completion import CompletionRequest, CompletionResponse
from jaxllm.serve.protocol.responses import ResponsesRequest, ResponsesResponse
from jaxllm.serve.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from jaxllm.serve.streams import JsonResponse, unless_disconnected

STATIC = Path(__file__).parent / "static"
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 404, 413, 500, 503)}


def build_app(context: Context) -> FastAPI:
    """The application around an engine that is running."""
    args = context.args
    app = FastAPI(
        title="jaxllm",
        version=context.version,
        openapi_url=None if args.disable_fastapi_docs else "/openapi.json",
        docs_url=None if args.disable_fastapi_docs else "/docs",
        redoc_url=None if args.disable_fastapi_docs else "/redoc",
    )
    app.state.context = context
    add_error_handlers(app)
    add_generation_routes(app, context)
    add_admin_routes(app, context)
    if args.dev_mode:
        add_dev_routes(app, context)
    add_web_page(app)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimitMiddleware, limit=args.max_body_size)
    if args.api_key:
        app.add_middleware(ApiKeyMiddleware, keys=args.api_key)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(args.allowed_origins),
        allow_methods=list(args.allowed_methods),
        allow_headers=list(args.allowed_headers),
        allow_credentials=args.allow_credentials,
    )
    app.add_middleware(CountMiddleware, context=context)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Every error has the same shape."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and not (media_type == "application/json" or media_type.endswith("+json")):
            message = f"The Content-Type of a request must be application/json, got {media_type!r}"
            return ApiError(400, "Bad Request", message, "Content-Type").response()
        return validation_error(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        return http_error(error.status_code, error.detail, error.headers).response()


def add_web_page(app: FastAPI) -> None:
    """The files of the web page, each a route of its own: a mount at / would answer for every path that does not exist."""
    for path in sorted(STATIC.iterdir()):
        response = FileResponse(path, headers={"cache-control": "no-cache"})
        for route in ("/", "/index.html") if path.name == "index.html" else (f"/{path.name}",):
            app.add_route(route, response, methods=["GET", "HEAD"], include_in_schema=False)  # type: ignore[arg-type]  # an ASGI app


async def respond(
    request: Request,
    work: Callable[[], Coroutine[Any, Any, Response]],
    body: BaseModel,
    aliases: Mapping[str, str] | None = None,
) -> Response:
    """The response that `work` makes, or the error that it ends with; nothing once the client is gone."""
    try:
        check_surrogates(await request.body())
        return await unless_disconnected(request, work())
    except Exception as error:
        return to_api_error(error, body, aliases).response()


def check_surrogates(body: bytes) -> None:
    """JSON can write half of a surrogate pair, which is no text: it could neither be tokenized nor sent back.

    Raises:
        ApiError: if the body does.
    """
    if b"\\ud" in body or b"\\uD" in body:
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise bad_request(f"the body must be valid Unicode, got {error.object[error.start]!r}") from None


def add_generation_routes(app: FastAPI, context: Context) -> None:
    @app.post("/v1/completions", responses={200: {"model": CompletionResponse}, **ERRORS}, response_class=JsonResponse)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await respond(request, lambda: completions.create_completion(context, body, request), body)

    @app.post("/v1/chat/completions", responses={200: {"model": ChatCompletionResponse}, **ERRORS}, response_class=JsonResponse)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        return await respond(request, lambda: chat.create_chat_completion(context, body, request), body, chat.FIELD_NAMES)

    @app.post("/v1/responses", responses={200: {"model": ResponsesResponse}, **ERRORS}, response_class=JsonResponse)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return await respond(request, lambda: responses.create_response(context, body, request), body, responses.FIELD_NAMES)

    @app.post("/tokenize", responses={200: {"model": TokenizeResponse}, **ERRORS}, response_class=JsonResponse)
    async def create_tokenize(body: TokenizeRequest, request: Request) -> Response:
        async def work() -> Response:
            return JsonResponse(await tokenize.tokenize(context, body))

        return await respond(request, work, body)

    @app.post("/detokenize", responses={200: {"model": DetokenizeResponse}, **ERRORS}, response_class=JsonResponse)
    async def create_detokenize(body: DetokenizeRequest, request: Request) -> Response:
        async def work() -> Response:
            return JsonResponse(await tokenize.detokenize(context, body))

        return await respond(request, work, body)
