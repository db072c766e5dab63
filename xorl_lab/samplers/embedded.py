"""Sampling inside the process: continuous batching on the engine's own thread.

Requests join whatever is running.  All samples of all waiting prompts share one packed prefill;
from then on every sample is a row of a batch that advances by one token a step, and a row that is
finished leaves.  Rows of the same weights version form one batch, a *lane*.  Each token's logprob
is that of the very step that drew it.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from xorl_lab.engine import routing
from xorl_lab.engine.engine import Engine
from xorl_lab.engine.packing import pack
from xorl_lab.engine.versions import WeightsVersion
from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.futures import APIFuture
from xorl_lab.samplers.base import SampleRequest
from xorl_lab.samplers.cache import PromptCache, RowCache, room_for
from xorl_lab.samplers.drawing import Drawn, draw, uniforms
from xorl_lab.samplers.networks import Network, Networks, PlainNetwork
from xorl_lab.samplers.rows import Row, Task
from xorl_lab.types import SampleResponse

MAX_ROWS = 256
"""Most rows that are decoded at a time; further samples wait."""
CACHE_BYTES = 4 * 2**30
"""Memory that the keys and values of all rows may take."""
QUANTUM = 4
"""Decode steps of each lane between two looks at the training queue."""
CHUNK = 256
"""Prompt positions whose logits are held at a time."""


class EmbeddedSampler:
    """The sampler of one engine.  Attach it to the engine's scheduler once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: deque[Task] = deque()
        self._lanes: dict[WeightsVersion, Lane] = {}
        self._closed: Exception | None = None
        self._networks = Networks(engine.base)
        config = engine.base.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        size = engine.base.dtype.itemsize
        self._token_bytes = 2 * config.num_hidden_layers * heads * width * size
        engine.scheduler.attach(self)

    def submit(self, version: WeightsVersion, request: SampleRequest) -> APIFuture[SampleResponse]:
        """Queue a validated request on an immutable version of the weights.  Any thread."""
        return self.submit_all(version, [request])[0]

    def submit_all(
        self, version: WeightsVersion, requests: Sequence[SampleRequest]
    ) -> list[APIFuture[SampleResponse]]:
        """Queue several at once, so that which of them share a batch does not depend on timing.

        Raises:
            ConfigError: the experts are wanted of a model that has none, or of a kind that cannot
                be read.
        """
        if any(request.params.return_routed_experts for request in requests):
            try:
                routing.experts_of(self.engine.base)
            except ConfigError as error:
                name = self.engine.loaded.name
                raise ConfigError(
                    f"return_routed_experts is set, but of {name!r} nothing can be returned: "
                    f"{error}; leave it out (in a recipe: replay_experts)"
                ) from None
        tasks = [Task(version, request, self.engine.loaded) for request in requests]
        self._waiting.extend(tasks)
        # Looked at after the append: either this sees that it is closed, or close() sees the tasks.
        if self._closed is not None:
            for task in tasks:
                task.future.set_exception(self._closed)
        self.engine.scheduler.wake()
        return [task.future for task in tasks]

    # What follows runs on the worker thread.

    def has_work(self) -> bool:
        """True if a sample is waiting or under way."""
        return bool(self._waiting or self._lanes)

    def sweep(self) -> None:
        """End what was cancelled or has run out of time."""
        now = time.monotonic()
        for task in self._tasks():
            task.check_deadline(now)

    def run_quantum(self) -> None:
        """Let waiting samples in, and advance every lane by a few tokens."""
        self._admit()
        for version, lane in list(self._lanes.items()):
            try:
                with torch.no_grad():
                    lane.advance(self._networks.acquire(version), QUANTUM)
            except Exception as error:  # noqa: BLE001  (belongs to the requests of this lane)
                lane.fail(error)
            if not lane.rows:
                del self._lanes[version]
                self._networks.release(version)

    def fail(self, error: Exception) -> None:
        """End what is waiting or under way; what comes next starts afresh."""
        reason = SamplerError(f"sampling failed ({type(error).__name__}: {error})", retryable=True)
        self._drop(reason)
        self._networks = Networks(self.engine.base)

    def close(self, error: Exception) -> None:
        """End everything with this error, and what is submitted from now on."""
        self._closed = error
        self._drop(error)

    def _drop(self, error: Exception) -> None:
        for task in self._tasks():
            task.future.set_exception(error)
        self._waiting.clear()
        self._lanes.clear()

    def _tasks(self) -> Iterable[Task]:
        yield from list(self._waiting)
        for lane in list(self._lanes.values()):
            yield from {id(row.task): row.task for row in lane.rows}.values()

    def _admit(self) -> None:
        """Take waiting samples in as far as rows and memory allow; always at least one."""
        fresh: dict[WeightsVersion, list[Row]] = {}
        while self._waiting:
            task = self._waiting[0]
            if task.future.done():
                self._waiting.popleft()
                continue
            rows = task.take(self._room(task, fresh))
            if rows:
                fresh.setdefault(task.version, []).extend(rows)
            if task.remaining:
                break
            self._waiting.popleft()
        for version, rows in fresh.items():
            lane = self._lanes.setdefault(version, Lane(self.engine.base.device))
            try:
                with torch.no_grad():
                    lane.join(self._networks.acquire(version), rows)
            except Exception as error:  # noqa: BLE001  (belongs to the requests of this lane)
                lane.fail(error, rows)

    def _room(self, task: Task, fresh: Mapping[WeightsVersion, list[Row]]) -> int:
        """How many rows of a task may join those that run and those that are about to."""
        held: dict[WeightsVersion, list[Row]] = {v: lane.rows for v, lane in self._lanes.items()}
        held = {v: [*held.get(v, ()), *fresh.get(v, ())] for v in {*held, *fresh}}
        taken = sum(len(rows) for rows in held.values())
        # All rows of a lane are as wide as its widest.
        width = {v: max((row.task.span for row in rows), default=0) for v, rows in held.items()}
        elsewhere = sum(
            len(rows) * room_for(width[v]) for v, rows in held.items() if v is not task.version
        )
        widest = room_for(max(width.get(task.version, 0), task.span))
        beside = len(held.get(task.version, ()))
        room = (CACHE_BYTES // self._token_bytes - elsewhere) // widest - beside
        return min(MAX_ROWS - taken, room) if taken else max(1, min(MAX_ROWS, room))


class Lane:
    """The rows that are being drawn from one version of the weights."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows: list[Row] = []
        self.cache = RowCache()

    def join(self, network: Network, rows: list[Row]) -> None:
        """Run the prompts of new rows, each distinct one once, and draw their first tokens."""
        prompts = sorted({row.task.request.prompt for row in rows})
        for packed in pack(prompts):
            captured = PromptCache()
            with watched(network, rows) as seen:
                hidden = network.prefill(packed, captured)
            slots = {
                prompts[m]: nodes for m, nodes in zip(packed.members, packed.slots, strict=True)
            }
            here = [row for row in rows if row.task.request.prompt in slots]
            for task in {id(row.task): row.task for row in here}.values():
                if task.request.prompt_logprobs and task.prompt_logprobs is None:
                    nodes = torch.from_numpy(slots[task.request.prompt])
                    task.prompt_logprobs = prompt_logprobs(
                        hidden[nodes], network, task.request.prompt
                    )
            last = [int(slots[row.task.request.prompt][-1]) for row in here]
            distinct = sorted(set(last))
            logits = network.logits(hidden[distinct])
            spread = torch.tensor([distinct.index(node) for node in last])
            self.cache.add(captured, [slots[row.task.request.prompt] for row in here])
            self.rows += here
            if seen is not None:
                choice = seen.choice()
                for row in here:
                    if row.wants_experts:
                        row.experts.append(choice[slots[row.task.request.prompt]])
            self._record(here, logits[spread.to(logits.device)])
        self._leave()

    def advance(self, network: Network, steps: int) -> None:
        """Draw up to ``steps`` further tokens of every row."""
        for _ in range(steps):
            self._leave()
            if not self.rows:
                return
            tokens = torch.tensor([row.tokens[-1] for row in self.rows], device=self.device)
            with watched(network, self.rows) as seen:
                hidden = network.step(tokens, self.cache)
            if seen is not None:
                for row, experts in zip(self.rows, seen.choice(), strict=True):
                    if row.wants_experts:
                        row.experts.append(experts[None])
            self._record(self.rows, network.logits(hidden))
        self._leave()

    def fail(self, error: Exception, joining: Iterable[Row] = ()) -> None:
        """End every request of this lane."""
        for row in (*self.rows, *joining):
            row.task.future.set_exception(
                SamplerError(f"sampling failed ({type(error).__name__}: {error})", retryable=True)
            )
        self.rows = []
        self.cache = RowCache()

    def _record(self, rows: list[Row], logits: torch.Tensor) -> None:
        """Draw one token for each row from its logits (R, V) and note it."""
        top = max(row.task.request.top_logprobs for row in rows)
        spread = any(row.task.request.entropies for row in rows)
        numbers = uniforms([row.stream for row in rows], [len(row.tokens) for row in rows])
        params = [row.task.request.params for row in rows]
        drawn: Drawn = draw(logits, params, numbers, top, spread)
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        ids, values = drawn.top_ids.tolist(), drawn.top_logprobs.tolist()
        none = [None] * len(rows)
        entropies = none if drawn.entropies is None else drawn.entropies.tolist()
        for i, row in enumerate(rows):
            best = list(zip(ids[i], values[i], strict=True))
            row.append(tokens[i], logprobs[i], best, entropies[i])

    def _leave(self) -> None:
        """Drop the rows that are finished or no longer wanted."""
        staying = [i for i, row in enumerate(self.rows) if not row.finished]
        if len(staying) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in staying]
        self.cache.keep(staying)


def watched(
    network: Network, rows: Sequence[Row]
) -> AbstractContextManager[routing.Recorded | None]:
    """Note the experts that a network chooses inside the block, if one of the rows wants them."""
    if isinstance(network, PlainNetwork) and any(row.wants_experts for row in rows):
        return routing.recorded(network.routers)
    return nullcontext()


def prompt_logprobs(
    hidden: torch.Tensor, network: Network, prompt: tuple[int, ...]
) -> list[float | None]:
    """Logprob of each prompt token but the first, at temperature 1.

    Args:
        hidden: (N, H) of the N prompt tokens.
        network: the weights that computed them.
        prompt: N token ids.

    Returns:
        N entries, nats; the first is None.
    """
    result: list[float | None] = [None]
    for start in range(0, len(prompt) - 1, CHUNK):
        targets = torch.tensor(prompt[start + 1 : start + 1 + CHUNK], device=hidden.device)
        logits = network.logits(hidden[start : start + len(targets)]).float()
        picked = logits.gather(-1, targets[:, None]).squeeze(-1) - torch.logsumexp(logits, -1)
        result += picked.tolist()
    return result
