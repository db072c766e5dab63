"""One trained model of a server: its session, its epoch, and what is not saved yet."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xorl_lab.checkpoints import Address
from xorl_lab.client.local import LocalSession
from xorl_lab.engine import saving
from xorl_lab.engine.scheduler import Ticket
from xorl_lab.errors import EngineError
from xorl_lab.futures import APIFuture
from xorl_lab.server.bodies import LoraConfigIn
from xorl_lab.server.requests import Entry, Ledger
from xorl_lab.types import AdamParams, OptimStepResponse

Operation = Callable[[Entry], APIFuture[Any]]


@dataclass(slots=True)
class Held:
    """A request that has come before its turn."""

    entry: Entry
    run: Operation


class Model:
    """One model id: its session, the epoch's sequence numbers, and what is not saved yet.

    Args:
        model_id: its name.
        config: what was asked for at its creation; None for full weights.
        session: makes or gets the session; called on the intake thread.
    """

    def __init__(
        self, model_id: str, config: LoraConfigIn | None, make: Callable[[], LocalSession]
    ) -> None:
        self.model_id = model_id
        self.config = config
        self.ledger = Ledger()
        self.stale: set[int] = set()
        """Numbers with which clients of earlier epochs would go on."""
        self.held: dict[int, Held] = {}
        self.used = time.time()
        self.opened = False
        """True once create_model has named it; a default model may be used without."""
        self._make = make
        self._session: LocalSession | None = None
        self._gradients: list[Entry] = []
        self._saved = 0

    # On the intake thread.

    def session(self) -> LocalSession:
        """Its session, made on first use."""
        if self._session is None:
            self._session = self._make()
        return self._session

    def begin(self) -> APIFuture[Any]:
        """Start an epoch: drop the gradient that an older client may have left."""
        for entry in self._gradients:
            # Its failure is not the new client's business.
            if entry.future is not None:
                entry.future.observed = True
        self._gradients.clear()
        return self._drop("create_model")

    def count_gradient(self, entry: Entry) -> None:
        """Note a gradient that was sent, before it is looked at: it may yet be refused."""
        self._gradients.append(entry)

    def optim_step(self, adam: AdamParams) -> APIFuture[Any]:
        """Submit a step, unless a gradient was refused and its sender does not know yet."""
        gradients, self._gradients = self._gradients, []
        errors = [e.rejected for e in gradients if e.rejected is not None and not e.seen]
        if errors:
            return self._drop("optim_step", errors[0])
        session = self.session()
        future = session.optim_step(adam)
        future.add_done_callback(lambda f: _tell_version(f, session))
        return future

    def save(self, name: str | None, ttl: float | None, overwrite: bool) -> APIFuture[Any]:
        """Submit a checkpoint to resume from."""
        session = self.session()
        future = session.save_state(name, ttl, overwrite)
        future.add_done_callback(lambda f: self._note_saved(f, session))
        return future

    def load(self, address: Address, *, with_optimizer: bool) -> APIFuture[Any]:
        """Submit the loading of a checkpoint; at any time, but only of one that fits."""
        session = self.session()
        if session.closed is not None:
            raise EngineError(session.closed)

        def run(ticket: Ticket) -> dict[str, Any]:
            ticket.commit()
            # Not before its turn: what a save that is queued will write may be what is loaded.
            folder = address.folder(session.root)
            saving.check_shape(folder, session.base_model, session.spec)
            saving.load(session.trained, folder, with_optimizer=with_optimizer)
            session.parent = address.uri
            return {"version": session.version}

        future = session.engine.scheduler.submit(run, name="load_state")
        future.add_done_callback(lambda f: self._note_saved(f, session))
        return future

    def _drop(self, name: str, cause: BaseException | None = None) -> APIFuture[Any]:
        """Submit the dropping of the gradient; fails afterwards if there is a cause."""
        session = self.session()

        def drop(_: object) -> None:
            session.trained.drop_window()
            if cause is not None:
                raise EngineError(
                    f"{name} was not carried out, because a call before it failed ({cause}): the "
                    "gradient accumulated since the last step was dropped, the weights are as "
                    "they were; send the data again"
                )

        return session.engine.scheduler.submit(drop, name=name)

    # On any thread.

    @property
    def live(self) -> LocalSession | None:
        """Its session, if there is one."""
        return self._session

    @property
    def unsaved(self) -> bool:
        """True if it has taken steps that no checkpoint holds."""
        session = self._session
        return (
            session is not None
            and session.trained.steps > 0
            and session.trained.version != self._saved
        )

    def _note_saved(self, future: APIFuture[Any], session: LocalSession) -> None:
        # On the worker thread, before the next operation: the version is the one that was saved.
        if future.exception(0) is None:
            self._saved = session.trained.version

    def idle(self) -> APIFuture[Any]:
        """Submit nothing, behind all that is queued."""
        if self._session is None:
            return APIFuture[None].completed(None)
        return self._session.engine.scheduler.submit(lambda _: None, name="wait")

    def close(self) -> APIFuture[Any]:
        """Refuse further calls; done when those before have ended."""
        future = self.idle()
        if self._session is not None:
            self._session.close(f"model {self.model_id!r} was unloaded: create it again")
        return future


def _tell_version(future: APIFuture[OptimStepResponse], session: LocalSession) -> None:
    # On the worker thread, before the next operation: it is the version that the step has made.
    if future.exception(0) is None:
        future.result(0).info["version"] = session.version
