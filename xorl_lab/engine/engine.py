"""A base model in memory with its worker thread: one per process and (model, device, dtype)."""

import atexit
import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

from xorl_lab.engine import models
from xorl_lab.engine.logprobs import run_packed
from xorl_lab.engine.packing import pack
from xorl_lab.engine.scheduler import Scheduler
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import ConfigError

_engines: dict[tuple[str, str, str], "Engine"] = {}
_lock = threading.Lock()


class Engine:
    """The base model, which is never written to, and the thread on which all work on it runs."""

    def __init__(self, loaded: models.LoadedModel) -> None:
        self.loaded = loaded
        self.base = loaded.model
        check_packing(loaded)
        self.base_version = WeightsVersion("", 0, full=None)
        self.scheduler = Scheduler(loaded.name)


def get(name: str, device: str = "auto", dtype: str = "auto") -> Engine:
    """The engine of a base model; asking again gives the same one.

    Raises:
        ConfigError: see :func:`xorl_lab.engine.models.load`.
    """
    place = models.resolve_device(device)
    key = (name, place, models.resolve_dtype(dtype, place))
    with _lock:
        if key not in _engines:
            # The model outlives the caller's modes: an inference tensor could never be trained on,
            # and the checks of a model must not be rounded by an autocast.
            with (
                torch.inference_mode(mode=False),
                torch.autocast(place, enabled=False),
                torch.device("cpu"),
                _one_thread(),
            ):
                _engines[key] = Engine(models.load(*key))
        return _engines[key]


@contextmanager
def _one_thread() -> Generator[None]:
    """Compute on the caller's thread alone inside the block.

    libgomp keeps helpers for each thread that ever shared work, and once there are more of them
    than processors lets none wait awake: each of the worker's thousand products per step would then
    begin by waking a thread.  So the caller gets no helpers from us.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def close_all() -> None:
    """Stop every engine's thread and forget the models."""
    with _lock:
        engines = list(_engines.values())
        _engines.clear()
    for engine in engines:
        engine.scheduler.close()


def check_packing(loaded: models.LoadedModel) -> None:
    """Make sure that the model computes a packed row as it computes sequences of their own.

    Raises:
        ConfigError: it does not, as with recurrent layers, which see their neighbours in the row.
    """
    row = pack([[1, 2, 3], [1, 4]])[0]
    with torch.no_grad():
        packed = run_packed(loaded.model, row)[torch.from_numpy(row.slots[1])].float()
        alone = run_packed(loaded.model, pack([[1, 4]])[0]).float()
        difference = float((packed - alone).norm() / alone.norm())
    # float32 gives about 1e-6 and bfloat16 about 1e-2; a leak between neighbours gives about 1.
    if difference > 0.1:
        raise ConfigError(
            f"base model {loaded.name!r} mixes neighbouring sequences of a packed row "
            f"(relative difference {difference:.2g}): choose a model with causal attention only"
        )


atexit.register(close_all)
