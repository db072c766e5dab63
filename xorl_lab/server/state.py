"""The parts of a running server, in one place for its routes."""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from xorl_lab.client.local import LocalService
from xorl_lab.server.generate import Generator
from xorl_lab.server.inference import Inference
from xorl_lab.server.models import Models
from xorl_lab.server.requests import Requests
from xorl_lab.server.settings import ServerSettings


@dataclass(slots=True)
class State:
    """What the routes work with."""

    settings: ServerSettings
    service: LocalService
    requests: Requests
    models: Models
    inference: Inference
    generator: Generator
    sessions: dict[str, float] = field(default_factory=dict[str, float])
    """Client sessions and when they were last heard of, in seconds since the epoch."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nobody is to wait any longer."""

    @classmethod
    def build(cls, settings: ServerSettings) -> "State":
        """Load the model and put the parts together.

        Raises:
            ConfigError: the model is unknown, or device or dtype is not to be had.
        """
        service = LocalService(settings.root, device=settings.device, dtype=settings.dtype)
        requests = Requests(settings.kept_requests, settings.kept_bytes)
        models = Models(settings, service, requests)
        inference = Inference(settings, service)
        return cls(settings, service, requests, models, inference, Generator(inference))


def _of(request: Request) -> State:
    lab = request.app.state.lab
    assert isinstance(lab, State)
    return lab


Lab = Annotated[State, Depends(_of)]
"""Parameter of a route: the server's parts."""
