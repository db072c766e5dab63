"""The application: routes, and how failures become HTTP answers."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from xorl_lab.checkpoints import catalog
from xorl_lab.errors import CheckpointError, LabError, SamplerError
from xorl_lab.server import sampling_api, storage_api, training_api
from xorl_lab.server.models import Busy, Unknown
from xorl_lab.server.requests import Conflict
from xorl_lab.server.security import Gate
from xorl_lab.server.settings import ServerSettings
from xorl_lab.server.state import State
from xorl_lab.server.wire import explain

SWEEP_SECONDS = 600.0
"""How often checkpoints that have expired are deleted."""
STATUS = {"checkpoint.not_found": 404, "checkpoint.exists": 409}
"""HTTP status of a checkpoint's error; 400 for the others."""

logger = logging.getLogger(__name__)


def create_app(settings: ServerSettings, state: State | None = None) -> FastAPI:
    """Load the model and make the application.

    Args:
        settings: the server's.
        state: its parts, if they exist already.

    Returns:
        An ASGI application; ``app.state.lab`` holds its parts.

    Raises:
        ConfigError: the model is unknown, or device or dtype is not to be had.
    """
    parts = state or State.build(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        sweeper = asyncio.ensure_future(_sweep_for_ever(settings))
        try:
            yield
        finally:
            sweeper.cancel()
            await stop(parts)

    app = FastAPI(
        title="xorl-lab",
        description="Training and sampling of one base model: xorl's protocol.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.lab = parts
    for module in (training_api, storage_api, sampling_api):
        app.include_router(module.routes)
    app.add_middleware(Gate, token=settings.token, max_body_bytes=settings.max_body_bytes)
    _translate_errors(app)
    return app


async def stop(state: State) -> list[str]:
    """Wind a server up: no new requests, finish or cancel what is queued, save what is unsaved.

    Returns:
        Paths of the checkpoints that were written.  Calling it again does nothing.
    """
    if state.stopping.is_set():
        return []
    state.generator.abort("", everything=True)
    await state.models.drain(state.settings.drain_seconds)
    saved: list[str] = []
    for model in state.models.live() if state.settings.save_on_shutdown else []:
        try:
            path = await state.models.save_unsaved(model, "shutdown")
        except Exception:
            logger.exception("model %r could not be saved", model.model_id)
            continue
        if path is not None:
            logger.warning("model %r was saved as %s", model.model_id, path)
            saved.append(path)
    state.stopping.set()
    state.models.close()
    await asyncio.get_running_loop().run_in_executor(None, state.inference.endpoints.close)
    return saved


def _translate_errors(app: FastAPI) -> None:
    statuses: dict[type[Exception], int] = {Busy: 503, Conflict: 409, Unknown: 404}

    async def known(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, statuses[type(error)])

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        errors = error.errors() if isinstance(error, RequestValidationError) else []
        return JSONResponse({"detail": explain(errors)}, 400)

    async def ours(_: Request, error: Exception) -> JSONResponse:
        code = error.code if isinstance(error, CheckpointError) else ""
        if isinstance(error, ValueError | CheckpointError):
            return JSONResponse({"detail": str(error)}, STATUS.get(code, 400))
        status = 503 if isinstance(error, SamplerError) and error.retryable else 500
        return JSONResponse({"detail": str(error)}, status)

    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        # The server's log gets the traceback; the client does not.
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return JSONResponse({"detail": "internal error: the server's log has the details"}, 500)

    for kind in statuses:
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(LabError, ours)
    app.add_exception_handler(Exception, unforeseen)


async def _sweep_for_ever(settings: ServerSettings) -> None:
    loop = asyncio.get_running_loop()
    while True:
        with suppress(OSError, LabError):
            for uri in await loop.run_in_executor(None, catalog.sweep, settings.root):
                logger.warning("checkpoint %s has expired and was deleted", uri)
        await asyncio.sleep(SWEEP_SECONDS)
