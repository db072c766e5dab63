"""The routes of the sampling side, at the root and where xorl has them under ``/api/v1``."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from xorl_lab import __version__
from xorl_lab.errors import SamplerError
from xorl_lab.server import bodies
from xorl_lab.server.generate import GenerateIn
from xorl_lab.server.inference import timer
from xorl_lab.server.models import Busy
from xorl_lab.server.state import Lab, State
from xorl_lab.types.checkpoints import InferenceEndpointResponse, SyncWeightsResponse

routes = APIRouter(tags=["sampling"])


async def _sync(lab: State, model_id: str | None) -> SyncWeightsResponse:
    started = timer()
    version = await lab.models.snapshot(model_id)
    return await lab.inference.publish(version, started)


@routes.post("/generate")
async def generate(body: GenerateIn, lab: Lab, request: Request) -> Any:  # noqa: ANN401
    """Draw completions."""
    if lab.models.closing:
        raise Busy("the server is being stopped")
    async with client_gone(request) as gone:
        return JSONResponse(await lab.generator.generate(body, gone))


@routes.post("/abort_request")
async def abort_request(body: bodies.AbortIn, lab: Lab) -> dict[str, Any]:
    """Give up a request to ``/generate``, or all."""
    return {"aborted": lab.generator.abort(body.rid, everything=body.abort_all)}


@routes.get("/health")
async def health(lab: Lab) -> dict[str, Any]:
    """Say that the server is there, and how busy it is."""
    return {
        "xorl_lab": __version__,
        "is_lora": not lab.settings.full,
        "status": "stopping" if lab.models.closing else "healthy",
        "engine_running": not lab.models.closing,
        "active_requests": lab.requests.active + lab.generator.active,
        "total_requests": lab.requests.total,
    }


@routes.get("/health_generate")
async def health_generate(request: Request, lab: Lab) -> Response:
    """Draw one token."""
    body = GenerateIn(input_ids=[0], sampling_params={"max_new_tokens": 1})
    async with client_gone(request) as gone:
        await lab.generator.generate(body, gone)
    return Response(status_code=200)


@routes.get("/model_info")
@routes.get("/get_model_info")
async def model_info(lab: Lab) -> dict[str, Any]:
    """The served model, under SGLang's names."""
    info = lab.inference.server_info()
    names = ("model_path", "tokenizer_path", "weight_version", "context_length", "vocab_size")
    known = {name: info[name] for name in names}
    return {**known, "is_generation": True, "xorl_lab": __version__}


@routes.get("/server_info")
@routes.get("/get_server_info")
async def server_info(lab: Lab) -> dict[str, Any]:
    """The embedded sampler's settings, under SGLang's names."""
    return lab.inference.server_info()


@routes.get("/v1/models")
async def list_models(lab: Lab) -> dict[str, Any]:
    """The served model and the registered adapters."""
    base = lab.inference.engine.loaded.name
    entry = {"object": "model", "owned_by": "xorl-lab"}
    adapters = [{**entry, "id": name, "parent": base} for name in lab.inference.adapters()]
    return {"object": "list", "data": [{**entry, "id": base, "parent": None}, *adapters]}


@routes.post("/api/v1/create_sampling_session")
async def create_sampling_session(body: bodies.SamplingSessionIn, lab: Lab) -> dict[str, Any]:
    """Load a checkpoint for ``/generate``, here and at all endpoints; its name is the same."""
    try:
        name = await lab.inference.register(body.model_path, bind=body.bind)
    except SamplerError as error:
        answer = {"success": False, "model_path": body.model_path, "lora_name": ""}
        return {**answer, "message": str(error)}
    version = lab.inference.version(name)
    return {
        "success": True,
        "model_path": body.model_path,
        "lora_name": name,
        "message": f"version {version.number} of {version.model_id!r} answers to {name!r}",
    }


@routes.post("/sync_inference_weights")
@routes.post("/api/v1/sync_inference_weights")
async def sync_inference_weights(body: bodies.SyncIn, lab: Lab) -> dict[str, Any]:
    """Let ``/generate`` answer with the current weights, behind all that is queued."""
    return asdict(await _sync(lab, body.model_id))


@routes.post("/add_inference_endpoint")
@routes.post("/api/v1/add_inference_endpoint")
async def add_inference_endpoint(body: bodies.AddEndpointIn, lab: Lab) -> dict[str, Any]:
    """Register a sampler."""
    endpoint, message = await lab.inference.endpoints.add(body)
    answer = asdict(InferenceEndpointResponse(endpoint is not None, message, endpoint))
    synced = await _sync(lab, None) if endpoint is not None and body.sync_weights else None
    return {
        **answer,
        "weights_synced": synced is not None and synced.success,
        "sync_message": None if synced is None else synced.message,
    }


@routes.post("/remove_inference_endpoint")
@routes.post("/api/v1/remove_inference_endpoint")
async def remove_inference_endpoint(body: bodies.EndpointIn, lab: Lab) -> dict[str, Any]:
    """Forget a sampler."""
    gone = await lab.inference.endpoints.remove(body.host, body.port)
    message = "removed" if gone else "it was not registered"
    return {"success": gone, "message": f"{body.host[:200]}:{body.port}: {message}"}


@routes.get("/list_inference_endpoints")
@routes.get("/api/v1/list_inference_endpoints")
async def list_inference_endpoints(lab: Lab) -> dict[str, Any]:
    """The registered samplers, each asked how it is."""
    endpoints = await lab.inference.endpoints.listed()
    return {"endpoints": [asdict(e) for e in endpoints], "count": len(endpoints)}


@routes.post("/sleep")
@routes.post("/wake_up")
@routes.post("/api/v1/sleep")
@routes.post("/api/v1/wake_up")
async def sleep(lab: Lab) -> dict[str, Any]:
    """Nothing to do: trainer and sampler share one copy of the base model."""
    return {"success": True, "message": "trainer and sampler share their memory here"}


@asynccontextmanager
async def client_gone(request: Request) -> AsyncGenerator[asyncio.Future[None]]:
    """A future that is done when the client has hung up."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    task = asyncio.ensure_future(watch())
    try:
        yield task
    finally:
        task.cancel()
