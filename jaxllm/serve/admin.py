"""Routes that generate nothing: what the server is, how it is, and the control of the engine."""

import dataclasses
from collections.abc import Awaitable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from pydantic import BaseModel
from starlette.responses import Response

from jaxllm.serve.context import Context
from jaxllm.serve.errors import http_error, to_api_error, unknown_model
from jaxllm.serve.metrics import CONTENT_TYPE, metrics_page
from jaxllm.serve.streams import JsonResponse


def model_cards(context: Context) -> list[dict[str, Any]]:
    """What /v1/models lists: every name of the model."""
    return [
        {
            "id": name,
            "object": "model",
            "created": context.started,
            "owned_by": "jaxllm",
            "root": context.config.model.model,
            "parent": None,
            "max_model_len": context.max_model_len,
            "permission": [
                {
                    "id": f"modelperm-{position}",
                    "object": "model_permission",
                    "created": context.started,
                    "allow_create_engine": False,
                    "allow_sampling": True,
                    "allow_logprobs": True,
                    "allow_search_indices": False,
                    "allow_view": True,
                    "allow_fine_tuning": False,
                    "organization": "*",
                    "group": None,
                    "is_blocking": False,
                }
            ],
        }
        for position, name in enumerate(context.model_names)
    ]


def add_admin_routes(app: FastAPI, context: Context) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        return JsonResponse({"object": "list", "data": model_cards(context)})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        for card in model_cards(context):
            if card["id"] == name:
                return JsonResponse(card)
        raise unknown_model(name, context.model_names)

    @app.get("/health", responses={503: {}})
    async def health() -> Response:
        return await _health(context)

    @app.get("/ping", responses={503: {}})
    @app.post("/ping", responses={503: {}})
    async def ping() -> Response:
        return await _health(context)

    @app.get("/version")
    async def get_version() -> Response:
        return JsonResponse({"version": context.version})

    @app.get("/load")
    async def load() -> Response:
        # This request itself is none of the load.
        return JsonResponse({"server_load": max(0, context.num_open - 1)})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_page(context), media_type=CONTENT_TYPE)

    if context.config.parallel.data_parallel_backend == "ray":

        @app.post("/scale")
        async def scale(body: ScaleRequest) -> Response:
            try:
                await context.engine.scale(body.data_parallel_size)
            except Exception as error:
                raise to_api_error(error) from error
            return JsonResponse({"data_parallel_size": context.engine.num_engines})


class ScaleRequest(BaseModel):
    """How many engines there are to be. The answer comes when there are."""

    data_parallel_size: int


async def _health(context: Context) -> Response:
    try:
        await context.engine.check_health()
    except RuntimeError:
        return Response(status_code=503)
    return Response(status_code=200)


class AbortRequest(BaseModel):
    """Ids of responses; null for all."""

    request_ids: list[str] | None = None


def add_dev_routes(app: FastAPI, context: Context) -> None:
    """Routes that control the engine."""
    engine = context.engine

    async def control(call: Awaitable[Any]) -> Any:
        try:
            return await call
        except Exception as error:
            raise to_api_error(error) from error

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> Response:
        if await control(engine.reset_prefix_cache(reset_running_requests)):
            return Response(status_code=200)
        raise http_error(409, "The prefix cache was not reset: blocks are in use")

    @app.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> Response:
        await control(engine.sleep(level, mode))
        return Response(status_code=200)

    @app.post("/wake_up")
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        await control(engine.wake_up(tags))
        return Response(status_code=200)

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return JsonResponse({"is_sleeping": await control(engine.is_sleeping())})

    @app.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> Response:
        await control(engine.pause_generation(mode=mode, clear_cache=clear_cache))
        return JsonResponse({"status": "paused"})

    @app.post("/resume")
    async def resume() -> Response:
        await control(engine.resume_generation())
        return JsonResponse({"status": "resumed"})

    @app.get("/is_paused")
    async def is_paused() -> Response:
        return JsonResponse({"is_paused": await control(engine.is_paused())})

    @app.post("/abort_requests")
    async def abort_requests(body: AbortRequest) -> Response:
        return JsonResponse({"aborted": await context.abort(body.request_ids)})

    @app.get("/server_info")
    async def server_info() -> Response:
        args = dataclasses.asdict(context.args)
        args["api_key"] = len(context.args.api_key)  # how many there are, not what they are
        return JsonResponse({"version": context.version, "config": dataclasses.asdict(context.config), "args": args})
