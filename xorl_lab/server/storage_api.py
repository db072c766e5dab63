"""The direct routes about checkpoints, runs and sessions."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query

from xorl_lab.checkpoints import catalog
from xorl_lab.checkpoints.folder import glance
from xorl_lab.checkpoints.names import check_model_id
from xorl_lab.errors import CheckpointError, DataError
from xorl_lab.server import bodies
from xorl_lab.server.models import Model
from xorl_lab.server.state import Lab, State
from xorl_lab.server.training_api import address_of
from xorl_lab.types.checkpoints import (
    DeleteCheckpointResponse,
    KillSessionResponse,
    TrainingRun,
    WeightsInfoResponse,
)

MAX_SESSIONS = 1024
"""Client sessions to remember; the oldest are forgotten."""
T = TypeVar("T")


routes = APIRouter(prefix="/api/v1", tags=["storage"])


@routes.post("/list_checkpoints")
async def list_checkpoints(body: bodies.ForModel, lab: Lab) -> dict[str, Any]:
    """All checkpoints of a model, oldest first."""
    check_model_id(body.model_id)
    found = await _thread(lambda: catalog.listing(lab.settings.root, body.model_id))
    return {"checkpoints": [asdict(checkpoint) for checkpoint in found]}


@routes.post("/delete_checkpoint")
async def delete_checkpoint(body: bodies.CheckpointIn, lab: Lab) -> dict[str, Any]:
    """Delete a checkpoint."""
    try:
        address = address_of(body.checkpoint_id, body.model_id)
        await _thread(lambda: catalog.delete(lab.settings.root, address))
    except (CheckpointError, DataError) as error:
        return asdict(DeleteCheckpointResponse(False, error=str(error)))
    return asdict(DeleteCheckpointResponse(True, address.uri))


@routes.post("/weights_info")
async def weights_info(body: bodies.WeightsInfoIn, lab: Lab) -> dict[str, Any]:
    """What is needed to continue from a checkpoint."""
    folder = address_of(body.xorl_path, "default").folder(lab.settings.root)
    saved = await _thread(lambda: glance(folder))
    lora = saved.get("lora") or {}
    info = WeightsInfoResponse(str(saved["base_model"]), bool(lora), lora.get("rank"))
    return {**asdict(info), "lora": saved.get("lora")}


@routes.get("/training_runs")
async def training_runs(
    lab: Lab,
    limit: Annotated[int, Query(ge=0, le=10_000)] = 20,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> dict[str, Any]:
    """The models that are held, and those of which there are checkpoints."""
    held = {model.model_id: model for model in lab.models.live()}
    runs = await _thread(lambda: _runs(lab, held))
    cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
    return {
        "training_runs": [asdict(run) for run in runs[offset : offset + limit]],
        "cursor": cursor,
    }


@routes.post("/kill_session")
async def kill_session(body: bodies.KillSessionIn, lab: Lab) -> dict[str, Any]:
    """Let go of a model, saving it first if it has unsaved steps."""
    held, path = await lab.models.kill(body.model_id, save=body.save_checkpoint)
    message = f"model {body.model_id!r} " + ("was let go" if held else "was not held")
    if held and body.save_checkpoint and path is None:
        message += "; it had no unsaved steps"
    return asdict(KillSessionResponse(True, message, path))


@routes.post("/abort_gradient_epoch")
async def abort_gradient_epoch(body: bodies.ForModel, lab: Lab) -> dict[str, Any]:
    """Drop the gradient accumulated since the last step."""
    await lab.models.drop_gradient(body.model_id)
    return {"success": True, "message": "the accumulated gradient was dropped"}


@routes.post("/get_info")
async def get_info(body: bodies.ForModel, lab: Lab) -> dict[str, Any]:
    """What a model is."""
    session = lab.models.find(body.model_id).live
    loaded = lab.inference.engine.loaded
    spec = None if session is None else session.spec
    return {
        "type": "get_info",
        "model_id": body.model_id,
        "model_name": loaded.name,
        "model_data": {"arch": type(loaded.model).__name__, "model_name": loaded.name},
        "is_lora": not lab.settings.full,
        "lora_rank": None if spec is None else spec.rank,
        "step": 0 if session is None else session.trained.steps,
        "version": 0 if session is None else session.version,
    }


@routes.post("/create_session")
async def create_session(lab: Lab) -> dict[str, Any]:
    """Name a client; models do not depend on it."""
    session_id = f"session-{secrets.token_hex(8)}"
    lab.sessions[session_id] = time.time()
    for old in list(lab.sessions)[:-MAX_SESSIONS]:
        del lab.sessions[old]
    return {"type": "create_session", "session_id": session_id}


@routes.post("/session_heartbeat")
async def session_heartbeat(body: bodies.SessionIn, lab: Lab) -> dict[str, Any]:
    """Note that a client is there."""
    if body.session_id is not None and body.session_id in lab.sessions:
        lab.sessions[body.session_id] = time.time()
    return {"type": "session_heartbeat"}


@routes.post("/session_info")
async def session_info(body: bodies.SessionIn, lab: Lab) -> dict[str, Any]:
    """What is known of a client, and the models that are held."""
    last = lab.sessions.get(body.session_id or "")
    return {
        "type": "session_info",
        "session_id": body.session_id,
        "known": last is not None,
        "last_heartbeat": None if last is None else catalog.iso(last),
        "model_ids": [model.model_id for model in lab.models.live()],
    }


@routes.get("/healthz")
async def healthz(lab: Lab) -> dict[str, Any]:
    """Say that the server is there."""
    return {"status": "ok"}


async def _thread(work: Callable[[], T]) -> T:
    """Do work on the disk without holding up the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _runs(state: State, held: dict[str, Model]) -> list[TrainingRun]:
    every = catalog.listing(state.settings.root)
    ids = sorted({*held, *(c.path.split("/")[2] for c in every)})
    return [_run(state, model_id, held.get(model_id), every) for model_id in ids]


def _run(state: State, model_id: str, model: Model | None, every: list[Any]) -> TrainingRun:
    mine = [c for c in every if c.path.split("/")[2] == model_id]
    newest = {c.checkpoint_type: c for c in mine}
    base, rank, is_lora = state.settings.model, None, not state.settings.full
    if model is not None and model.live is not None:
        rank = None if model.live.spec is None else model.live.spec.rank
    elif mine:
        address = address_of(mine[-1].path, model_id)
        saved = glance(address.folder(state.settings.root))
        lora = saved.get("lora") or {}
        base, rank, is_lora = str(saved["base_model"]), lora.get("rank"), bool(lora)
    used = catalog.iso(model.used) if model is not None else mine[-1].time
    return TrainingRun(
        training_run_id=model_id,
        base_model=base,
        model_owner="local",
        is_lora=is_lora,
        last_request_time=used,
        lora_rank=rank,
        last_checkpoint=newest.get("training"),
        last_sampler_checkpoint=newest.get("sampler"),
    )
