"""Decode steps recorded as CUDA graphs.

A step of a small model is a thousand kernels that take less time than Python needs to launch them.
A recording launches them at once, on the same addresses each time.  What changes is copied there:
tokens and positions at each step; an adapter when another version is drawn from, so that all of one
shape share recordings; keys and values when a batch's cache has been allocated anew, from when on
it lies in the recording's buffers and steps copy none.
"""

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from xorl_lab.samplers.cache import RowCache, room_for
from xorl_lab.samplers.lean import Deltas

if TYPE_CHECKING:
    from xorl_lab.samplers.networks import LeanNetwork

logger = logging.getLogger(__name__)
KEPT = 16
"""Most recordings that are held at a time."""
BYTES = 4 * 2**30
"""Memory that their keys and values may take, the latest aside."""
Run = Callable[[], torch.Tensor]
_recording = threading.Lock()  # CUDA allows one at a time in a process


def record(run: Run, device: torch.device) -> Run:
    """What launches the kernels of ``run`` again; it answers with the same tensor each time."""
    with _recording, torch.cuda.device(device):
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                run()  # libraries allocate what they keep
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads, as a notebook's own, may use the device meanwhile.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                result = run()
        finally:
            torch.cuda.set_stream(current)  # torch stays on the other one if recording fails
    return lambda: (graph.replay(), result)[1]


class Recording(RowCache):
    """A step of R rows, and the cache of S positions, all of them visited, that it works on."""

    def __init__(self, like: RowCache, rows: int, capacity: int) -> None:
        super().__init__()
        self._layers = [
            t.new_zeros(rows, *t.shape[1:3], capacity, t.shape[4]) for t in like._layers
        ]
        # The span is frozen as it is when recorded: it is all of the capacity.
        self._widths, self._span = like._widths, capacity
        self.lengths = torch.full((rows,), capacity)
        self.size = sum(t.nbytes for t in self._layers)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=self._layers[0].device)
        self._index = torch.zeros_like(self.tokens)
        self._tenant: Callable[[], RowCache | None] = lambda: None
        self.run: Run = lambda: self.tokens  # replaced by what computes (R, H) hidden states

    @staticmethod
    def shape_for(cache: RowCache) -> tuple[int, int]:
        """R and S with which a cache can take its next step."""
        width, longest = cache._capacity(), int(cache.lengths.max())
        rows = 1 << (len(cache) - 1).bit_length()
        return rows, width if longest < width else room_for(longest)

    def begin_step(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(R, 1) position ids, and the (R, 1, 1, S) mask of what the rows may see."""
        del device
        return self._aim()

    def step(self, tokens: torch.Tensor, cache: RowCache) -> torch.Tensor:
        """Take the next step of a cache of n <= R rows: (n,) ids -> (n, H) hidden states."""
        if not self._has(cache):
            self._move_in(cache)
        self.tokens[: len(tokens)] = tokens
        self._index[: len(tokens)] = cache.lengths.to(self._index.device)
        hidden = self.run()[: len(tokens)].clone()
        cache.end_step()
        return hidden

    def _has(self, cache: RowCache) -> bool:
        # Whatever else changes a cache's tensors allocates new ones.
        return cache._layers[0].data_ptr() == self._layers[0].data_ptr()

    def _move_in(self, cache: RowCache) -> None:
        tenant = self._tenant()
        if tenant is not None and self._has(tenant):
            tenant._move([t.clone() for t in tenant._layers])
        moved = [buffer[: len(cache)] for buffer in self._layers]
        for buffer, into, old in zip(self._layers, moved, cache._layers, strict=True):
            # What is out of sight has weight 0, and 0 times an infinity left here is NaN.
            buffer.zero_()
            into[:, :, :, : old.shape[3]] = old
        cache._move(moved)
        self._index.zero_()  # rows beyond n see and write their own first position only
        self._tenant = weakref.ref(cache)


class Recordings:
    """The recordings of one engine, which ``record`` makes when they are first needed."""

    def __init__(self, record: Callable[[Run, torch.device], Run] = record) -> None:
        self._record = record
        self._kept: dict[Hashable, Recording] = {}
        self._adapters: dict[Hashable, tuple[Deltas, Deltas]] = {}  # buffers, what is in them
        self._failed = False

    def find(
        self, lean: "LeanNetwork", kind: Hashable, cache: RowCache
    ) -> "Recording | LeanNetwork":
        """What takes the next step of a cache; networks of one ``kind`` share recordings."""
        if self._failed:
            return lean
        rows, capacity = Recording.shape_for(cache)
        try:
            step = type(lean)(lean.weights, self._adapter(kind, lean.deltas)).step
            found = self._kept.pop((kind, rows, capacity), None)
            if found is None:
                found = Recording(cache, rows, capacity)
                found.run = self._record(partial(step, found.tokens, found), found.tokens.device)
        except Exception as error:  # noqa: BLE001  (whatever it is, there is another way)
            self._failed = True
            self._kept.clear()
            why = f"{type(error).__name__}: {error}"
            logger.warning("sampling stays slow: its steps cannot be recorded here (%s)", why)
            return lean
        # The least recently used come first.
        while len(self._kept) >= KEPT or sum(r.size for r in self._kept.values()) > BYTES:
            del self._kept[next(iter(self._kept))]
        self._kept[kind, rows, capacity] = found
        return found

    def _adapter(self, kind: Hashable, deltas: Deltas) -> Deltas:
        buffers, loaded = self._adapters.get(kind) or (copy.deepcopy(deltas), deltas)
        if loaded is not deltas:
            for into, source in zip(_tensors(buffers), _tensors(deltas), strict=True):
                into.copy_(source)
        self._adapters[kind] = buffers, deltas
        return buffers


class GraphedNetwork:
    """A lean network, on the weights of a model, whose decode steps are recorded."""

    def __init__(self, lean: "LeanNetwork", model: PreTrainedModel, pool: Recordings) -> None:
        self.prefill, self.logits = lean.prefill, lean.logits
        self._lean, self._pool = lean, pool
        # What is trained moves on in place, and the recordings with it.
        weights = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
        deltas = lean.deltas.items()
        shapes = [(key, d.a.shape, *(b is None or b.shape for b in d.b)) for key, d in deltas]
        self._kind = (*weights, *shapes)

    def step(self, tokens: torch.Tensor, cache: RowCache) -> torch.Tensor:
        """See :class:`~xorl_lab.samplers.networks.Network`: (R,) ids -> (R, H) hidden states."""
        return self._pool.find(self._lean, self._kind, cache).step(tokens, cache)


def _tensors(deltas: Deltas) -> list[torch.Tensor]:
    return [t for d in deltas.values() for t in (d.a, *d.b) if t is not None]
