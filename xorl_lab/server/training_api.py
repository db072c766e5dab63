"""The two-phase routes: take a request on, answer with its id, and hand out the answer later."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from xorl_lab.checkpoints import Address
from xorl_lab.errors import DataError
from xorl_lab.futures import APIFuture
from xorl_lab.server import bodies, wire
from xorl_lab.server.models import Model
from xorl_lab.server.requests import Encode, Entry, digest_of
from xorl_lab.server.state import Lab, State
from xorl_lab.types.checkpoints import SaveWeightsForSamplerResponse

routes = APIRouter(prefix="/api/v1", tags=["training"])


def _take(
    lab: State,
    path: str,
    body: bodies.Sequenced,
    encode: Encode,
    run: Callable[[Model, Entry], APIFuture[Any]],
) -> JSONResponse:
    digest, size = digest_of(path, dict(body))
    taken = lab.models.submit(body.model_id, encode, run, body.seq_id, digest)
    if isinstance(taken, Entry):
        # The answer has about as many numbers as the request.
        taken.weight = size
    return phase_one(taken, body.model_id)


@routes.post("/create_model")
async def create_model(body: bodies.CreateModelIn, lab: Lab) -> JSONResponse:
    """Make a model, or start an epoch of one that is there."""
    entry = lab.models.create(body.model_id, body.base_model, body.lora_config)
    return phase_one(entry, body.model_id)


@routes.post("/unload_model")
async def unload_model(body: bodies.ForModel, lab: Lab) -> JSONResponse:
    """Let go of a model."""
    return phase_one(lab.models.unload(body.model_id), body.model_id)


@routes.post("/forward")
async def forward(body: bodies.ForwardBody, lab: Lab) -> JSONResponse:
    """Evaluate a loss."""

    def run(model: Model, _: Entry) -> APIFuture[Any]:
        asked = wire.read(bodies.ForwardIn, body.forward_input, "forward_input")
        data, params = wire.data_of(asked), wire.params_of(asked)
        return model.session().forward(data, asked.loss_fn, params)

    return _take(lab, "forward", body, wire.forward_json, run)


@routes.post("/forward_backward")
async def forward_backward(body: bodies.ForwardBackwardBody, lab: Lab) -> JSONResponse:
    """Evaluate a loss and accumulate its gradient."""

    def run(model: Model, entry: Entry) -> APIFuture[Any]:
        model.count_gradient(entry)
        given = body.forward_backward_input
        asked = wire.read(bodies.ForwardIn, given, "forward_backward_input")
        data, params = wire.data_of(asked), wire.params_of(asked)
        return model.session().forward_backward(data, asked.loss_fn, params)

    return _take(lab, "forward_backward", body, wire.forward_json, run)


@routes.post("/optim_step")
async def optim_step(body: bodies.OptimStepBody, lab: Lab) -> JSONResponse:
    """Apply the accumulated gradient."""

    def run(model: Model, _: Entry) -> APIFuture[Any]:
        return model.optim_step(wire.adam_of(body.adam_params))

    return _take(lab, "optim_step", body, wire.step_json, run)


@routes.post("/save_weights")
async def save_weights(body: bodies.SaveWeightsBody, lab: Lab) -> JSONResponse:
    """Save a checkpoint to resume from."""

    def run(model: Model, _: Entry) -> APIFuture[Any]:
        return model.save(body.path, body.ttl_seconds, body.overwrite)

    return _take(lab, "save_weights", body, lambda saved: {"path": saved.path}, run)


@routes.post("/load_weights")
async def load_weights(body: bodies.LoadWeightsBody, lab: Lab) -> JSONResponse:
    """Load a checkpoint; at any time."""
    with_optimizer = body.optimizer or body.load_optimizer
    path = body.path

    def run(model: Model, _: Entry) -> APIFuture[Any]:
        address = address_of(path, model.model_id)
        return model.load(address, with_optimizer=with_optimizer)

    return _take(lab, "load_weights", body, lambda loaded: {"path": path, "info": loaded}, run)


@routes.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: bodies.SaveForSamplerBody, lab: Lab) -> JSONResponse:
    """Save weights to sample from."""

    def run(model: Model, _: Entry) -> APIFuture[Any]:
        return model.session().save_weights_for_sampler(body.name, body.ttl_seconds)

    return _take(lab, "save_weights_for_sampler", body, sampler_json, run)


@routes.post("/retrieve_future")
async def retrieve_future(body: bodies.RetrieveFutureIn, lab: Lab) -> Response:
    """Wait for the answer to a request, as long as a long poll takes."""
    entry = lab.requests.get(body.request_id)
    if entry is None:
        text = "no such request: it is unknown here, or its answer is no longer kept"
        return JSONResponse({"error": text, "category": "user"})
    if not await entry.wait(lab.settings.poll_seconds, lab.stopping):
        return JSONResponse(_try_again(entry))
    content = await asyncio.get_running_loop().run_in_executor(None, entry.body)
    lab.requests.trim()
    return Response(content, media_type="application/json")


def phase_one(taken: Entry | str, model_id: str) -> JSONResponse:
    """The first answer to a two-phase request."""
    request_id = taken if isinstance(taken, str) else taken.request_id
    return JSONResponse({"request_id": request_id, "model_id": model_id})


def address_of(path: str, model_id: str) -> Address:
    """A checkpoint by any of its names: a URI, ``weights/NAME``, ``weights/MODEL/NAME``, ``NAME``.

    Raises:
        CheckpointError: it is none of these.
        DataError: it has too many parts.
    """
    if "://" in path:
        return Address.parse(path)
    parts = path.split("/")
    if len(parts) > 3:
        raise DataError(f"{path[:200]!r} is no checkpoint: pass xorl://MODEL/weights/NAME")
    if len(parts) == 1:
        parts = ["weights", *parts]
    kind, name = parts[0], parts[-1]
    model = parts[1] if len(parts) == 3 else model_id
    return Address.parse(f"xorl://{model}/{kind}/{name}")


def sampler_json(saved: SaveWeightsForSamplerResponse) -> dict[str, Any]:
    """``save_weights_for_sampler`` as the protocol has it."""
    return {
        "path": saved.path,
        "model_path": saved.model_path or "/".join(saved.path.split("/")[-2:]),
        "model": saved.model,
        "size": saved.size,
    }


def _try_again(entry: Entry) -> dict[str, Any]:
    answer = {"type": "try_again", "request_id": entry.request_id, "queue_state": "active"}
    if entry.waiting_for is not None:
        answer["queue_state_reason"] = f"waits for request {entry.waiting_for} of this model"
    return answer
