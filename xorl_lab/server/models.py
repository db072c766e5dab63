"""The trained models of a server: one session each, driven in order of sequence number.

**Order.**  Requests of a model are carried out strictly by ``seq_id`` as it counts up from 1;
those without one, as they arrive.  A request that comes before its turn waits for the missing one.
If that does not arrive in time, everything that waits fails with a message that says so, the
gradient accumulated so far is dropped, and counting goes on from there: a step without a gradient
that was sent would be worse than an error.

**Epochs.**  ``create_model`` starts one and counting starts anew.  A model that is there already
keeps its weights and optimizer, but not the gradient accumulated since its last step: a notebook
that was restarted between two calls would otherwise count it twice.

All bookkeeping happens on the event loop.  What may take long or wait (checking data, making
models) happens on one thread of its own, in the order in which it was handed over.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from xorl_lab.checkpoints.names import check_model_id
from xorl_lab.client.local import LocalService
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import ConfigError, EngineError
from xorl_lab.futures import APIFuture
from xorl_lab.server.bodies import LoraConfigIn
from xorl_lab.server.model import Held, Model, Operation
from xorl_lab.server.requests import Conflict, Encode, Entry, Ledger, Requests
from xorl_lab.server.settings import ServerSettings
from xorl_lab.server.wire import spec_of
from xorl_lab.types import LoraRunSpec, SaveWeightsResponse

DEFAULT = "default"
"""The model id that always exists."""

CANCEL_SECONDS = 5.0
"""How long operations that were cancelled may take to notice."""


class Busy(Exception):  # noqa: N818  (an answer to the client, not a failure of ours)
    """The server is being stopped; HTTP 503."""


class Unknown(Exception):  # noqa: N818  (an answer to the client, not a failure of ours)
    """There is no such model; HTTP 404."""


class Models:
    """All models of a server.

    Args:
        settings: the server's.
        service: makes sessions.
        requests: where answers are kept.
    """

    def __init__(self, settings: ServerSettings, service: LocalService, requests: Requests) -> None:
        self.settings = settings
        self.service = service
        self.requests = requests
        self.closing = False
        self._live: dict[str, Model] = {}
        self._intake = ThreadPoolExecutor(1, "xorl-lab intake")

    def live(self) -> list[Model]:
        """The models that are held, in order of id."""
        return [self._live[model_id] for model_id in sorted(self._live)]

    def find(self, model_id: str) -> Model:
        """A model by id; the default one is made when it is first asked for.

        Raises:
            CheckpointError: the id is not valid.
            Unknown: there is no such model.
        """
        check_model_id(model_id)
        if model_id not in self._live:
            if model_id != DEFAULT:
                raise Unknown(
                    f"there is no model {model_id!r}: create it with create_model; held are "
                    f"{sorted({*self._live, DEFAULT})}"
                )
            self._live[model_id] = self._new(model_id, None)
        model = self._live[model_id]
        model.used = time.time()
        return model

    def create(self, model_id: str, base_model: str, config: LoraConfigIn | None) -> Entry:
        """``create_model``: make a model, or start an epoch of one that is there.

        Raises:
            CheckpointError: the id is not valid.
            ConfigError: another base model or mode is served, or a setting is out of range.
            Conflict: the id is in use with other settings.
        """
        check_model_id(model_id)
        self._check_base(base_model)
        self._check_mode(config)
        spec_of(config)
        model = self._live.get(model_id)
        if model is not None and (model.live is not None or model.opened):
            _check_same(model, config, full=self.settings.full)
        else:
            model = self._new(model_id, config)
        self._check_open()
        self._live[model_id] = model
        self._fail_held(model, "the model was created again by another client")
        model.opened = True
        model.used = time.time()
        if model.ledger.next is not None:
            model.stale.add(model.ledger.next)
        model.ledger = Ledger(self.settings.kept_requests)
        answer = {"model_id": model_id, "type": "create_model"}
        entry = self._hand_over(model, lambda _: answer, lambda _: model.begin())
        entry.when_done(lambda _: self._forget_unmade(model))
        return entry

    def submit(
        self,
        model_id: str,
        encode: Encode,
        run: Callable[[Model, Entry], APIFuture[Any]],
        seq_id: int | None = None,
        digest: str = "",
    ) -> Entry | str:
        """Take on a request.

        Args:
            model_id: the model that it is about.
            encode: turns its result into JSON values.
            run: starts it; called on the intake thread when its turn has come.
            seq_id: its sequence number, if it has one.
            digest: hash of its body.

        Returns:
            The request, or the id of the one that this repeats.

        Raises:
            Unknown: there is no such model.
            Conflict: the number was used for something else.
            Busy: the server is being stopped.
        """
        model = self.find(model_id)
        if seq_id is not None:
            known = model.ledger.repeat(seq_id, digest)
            if known is not None:
                return known
        self._check_open()

        def operation(entry: Entry) -> APIFuture[Any]:
            return run(model, entry)

        if seq_id is None:
            return self._hand_over(model, encode, operation)
        if not model.opened and seq_id > 1 and model.ledger.next is None:
            raise Unknown(
                f"model {model_id!r} has not been created since this server started, but seq_id "
                f"is {seq_id}: create the client again, and load a checkpoint to go on from it"
            )
        return self._take_turn(model, encode, operation, seq_id, digest)

    def unload(self, model_id: str) -> Entry:
        """Let go of a model, behind all that is queued; one that is not held is gone already."""
        check_model_id(model_id)
        self._check_open()
        model = self._live.pop(model_id, None)
        answer = {"model_id": model_id, "type": "unload_model"}
        if model is None:
            entry = self.requests.open(model_id, lambda _: answer)
            entry.attach(APIFuture[None].completed(None))
            return entry
        self._fail_held(model, "the model was unloaded")
        return self._hand_over(model, lambda _: answer, lambda _: model.close())

    async def kill(self, model_id: str, *, save: bool) -> tuple[bool, str | None]:
        """Let go of a model, saving it first if it has unsaved steps.

        Returns:
            Whether it was held, and the checkpoint's path if one was written.

        Raises:
            CheckpointError: it could not be saved, and is still held.
        """
        check_model_id(model_id)
        self._check_open()
        model = self._live.get(model_id)
        if model is None:
            return False, None
        path = await self.save_unsaved(model, "killed") if save else None
        self._live.pop(model_id, None)
        self._fail_held(model, "the session was killed")
        await self._start(model.close)
        return True, path

    async def save_unsaved(self, model: Model, why: str) -> str | None:
        """Write a checkpoint behind all that is queued, if there are steps that none holds.

        Returns:
            Its path, or None if there was nothing to save.
        """
        await self._start(model.idle)
        if not model.unsaved:
            return None
        name = f"{why}-{time.strftime('%Y%m%d-%H%M%S')}"
        saved: SaveWeightsResponse = await self._start(lambda: model.save(name, None, False))
        return saved.path

    async def drop_gradient(self, model_id: str) -> None:
        """``abort_gradient_epoch``: forget the gradient accumulated since the last step."""
        model = self.find(model_id)
        self._check_open()
        await self._start(model.begin)

    async def snapshot(self, model_id: str | None) -> WeightsVersion:
        """The weights of a model behind all that is queued.

        Args:
            model_id: the model; None = the default one, or the only one that is held.
        """
        if model_id is None:
            only = [*self._live] if len(self._live) == 1 else []
            model_id = DEFAULT if DEFAULT in self._live or not only else only[0]
        model = self.find(model_id)
        self._check_open()
        return await self._start(lambda: model.session().snapshot())

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait for those that are queued, and cancel the rest."""
        self.closing = True
        for model in self.live():
            self._fail_held(model, "the server is being stopped")
        await self.requests.idle(seconds)
        for entry in self.requests.pending():
            entry.cancel()
        await self.requests.idle(CANCEL_SECONDS)

    def close(self) -> None:
        """Stop the intake thread; what it is doing is not waited for."""
        self._intake.shutdown(wait=False, cancel_futures=True)

    def _forget_unmade(self, model: Model) -> None:
        """A model that could not be made must not stand in the way of the next try."""
        if model.live is None and self._live.get(model.model_id) is model:
            del self._live[model.model_id]

    def _take_turn(
        self, model: Model, encode: Encode, run: Operation, seq_id: int, digest: str
    ) -> Entry:
        ledger = model.ledger
        if ledger.in_turn(seq_id):
            entry = self._hand_over(model, encode, run)
            ledger.note(seq_id, digest, entry.request_id)
            ledger.next = seq_id + 1
            self._release(model)
            return entry
        entry = self.requests.open(model.model_id, encode)
        if seq_id in model.stale:
            model.stale.add(seq_id + 1)
            entry.fail(
                EngineError(
                    f"this client of model {model.model_id!r} was replaced by a newer one: use "
                    "that, or give each client a model_id of its own"
                )
            )
            return entry
        ledger.note(seq_id, digest, entry.request_id)
        entry.waiting_for = ledger.next or 1
        model.held[seq_id] = Held(entry, run)
        loop = asyncio.get_running_loop()
        loop.call_later(self.settings.gap_seconds, self._give_up, model, ledger, seq_id)
        return entry

    def _release(self, model: Model) -> None:
        """Hand over what has waited for its turn."""
        ledger = model.ledger
        while ledger.next is not None and ledger.next in model.held:
            held = model.held.pop(ledger.next)
            held.entry.waiting_for = None
            self._run(held.entry, held.run)
            ledger.next += 1

    def _give_up(self, model: Model, ledger: Ledger, seq_id: int) -> None:
        """The time of a request that waits is up: fail all that waits, and count on from there."""
        if self.closing or model.ledger is not ledger or seq_id not in model.held:
            return
        missing, last = ledger.next or 1, max(model.held)
        ledger.next = last + 1
        self._fail_held(
            model,
            f"request {missing} of model {model.model_id!r} did not arrive within "
            f"{self.settings.gap_seconds:g} s, so nothing behind it was carried out; send it again "
            f"under new numbers from {last + 1}",
        )
        self._intake.submit(model.begin)

    def _fail_held(self, model: Model, why: str) -> None:
        held, model.held = model.held, {}
        for _, waiting in sorted(held.items()):
            waiting.entry.fail(EngineError(why))

    def _hand_over(self, model: Model, encode: Encode, run: Operation) -> Entry:
        entry = self.requests.open(model.model_id, encode)
        self._run(entry, run)
        return entry

    def _run(self, entry: Entry, run: Operation) -> None:
        def carry() -> None:
            try:
                entry.attach(run(entry))
            except BaseException as error:  # noqa: BLE001  (belongs to whoever waits for it)
                entry.reject(error)

        self._intake.submit(carry)

    async def _start(self, run: Callable[[], APIFuture[Any]]) -> Any:  # noqa: ANN401
        """Run something on the intake thread and wait for what it has submitted."""
        future = await asyncio.get_running_loop().run_in_executor(self._intake, run)
        return await future

    def _new(self, model_id: str, config: LoraConfigIn | None) -> Model:
        spec = None if self.settings.full else spec_of(config)
        wanted = None if self.settings.full else (config or LoraConfigIn())
        name = self.settings.model
        return Model(model_id, wanted, lambda: self.service.create(name, model_id, spec))

    def _check_open(self) -> None:
        if self.closing:
            raise Busy("the server is being stopped: start it again and create the client anew")

    def _check_base(self, base_model: str) -> None:
        served = self.settings.model
        if base_model == served:
            return
        folder = Path(served).expanduser()
        if folder.is_dir() and base_model:
            asked = Path(base_model).expanduser()
            if "\0" not in base_model and asked.is_dir() and asked.samefile(folder):
                return
        raise ConfigError(
            f"base model {base_model[:200]!r} is not served here: this server serves {served!r}"
        )

    def _check_mode(self, config: LoraConfigIn | None) -> None:
        tolerated = LoraConfigIn()
        if self.settings.full and config is not None and config != tolerated:
            raise ConfigError(
                "this server trains full weights (--full), but an adapter was asked for with "
                "settings of its own: leave them out, or start the server without --full"
            )


def _check_same(model: Model, config: LoraConfigIn | None, *, full: bool) -> None:
    """Compare what is asked for with what is there.

    Raises:
        Conflict: they differ.
    """
    if full:
        return
    asked, there = config or LoraConfigIn(), model.config or LoraConfigIn()
    new, old = _shape(spec_of(asked)), _shape(spec_of(there))
    differ = {name: (old[name], new[name]) for name in new if old[name] != new[name]}
    if asked.seed is not None and asked.seed != there.seed:
        differ["seed"] = (there.seed, asked.seed)
    if differ:
        text = ", ".join(f"{n} is {a!r}, not {b!r}" for n, (a, b) in sorted(differ.items()))
        raise Conflict(
            f"model {model.model_id!r} is held with other settings ({text}): unload it first, or "
            "use another model_id"
        )


def _shape(spec: LoraRunSpec) -> dict[str, Any]:
    names = [name for name in LoraRunSpec.__dataclass_fields__ if name != "seed"]
    return {name: getattr(spec, name) for name in names}
