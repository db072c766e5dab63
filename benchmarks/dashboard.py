"""What a live dashboard costs: bytes over the wire and kernel CPU per step.

    python -m benchmarks.dashboard [--steps 200]

Every step is an update of its own, the dearest case: a fast run shares one update, at most four a
second, among many steps.  Bytes are those of the whole message as the kernel sends it, with
signature, headers and buffers; CPU is the time of the sending thread, which reads what is new out
of a store on the disk and serialises it.  Budgets: at most 2 kB and 5 ms per step, at 10 and at
100,000 steps of history.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import comm
import numpy as np
import pandas as pd
from comm.base_comm import BaseComm
from jupyter_client.session import Session

from xorl_lab.store import Store, Writer
from xorl_lab.types import StepRecord
from xorl_lab.widgets import RunView
from xorl_lab.widgets.sender import SENDER

HISTORIES = (10, 100_000)
MOST_BYTES = 2000
MOST_MS = 5.0
NAMES = (
    *("reward", "reward:std", "reward:min", "reward:max", "reward:part:a", "reward:part:b"),
    *("rewards_failed", "groups_without_signal", "completion_tokens", "truncated"),
    *("kl_sampler", "kl_sampler_abs", "kl_base", "kl_base_abs", "kl_sample_train_k3"),
    *("entropy_sample", "loss:sum", "loss:mean", "valid_tokens", "rows_without_signal"),
    *("ratio_mean", "ratio_min", "ratio_max", "tis_mean", "tis_min", "tis_max"),
    *("pg_clipfrac", "tis_clipfrac", "icepop_maskfrac", "grad_norm", "grad_scale"),
    *("learning_rate", "version", "memory:process", "held_out:accuracy", "held_out:reward"),
    *(f"seconds:{part}" for part in ("sample", "score", "train", "sync", "evaluate", "total")),
    "tokens_per_second",
)


class Wire(BaseComm):
    """Serialises what the kernel would send, and counts it."""

    session = Session(key=b"0" * 32)
    total = 0

    def publish_msg(
        self,
        msg_type: str,
        data: Any = None,  # noqa: ANN401 (as in comm)
        metadata: Any = None,  # noqa: ANN401
        buffers: Any = None,  # noqa: ANN401
        **keys: Any,  # noqa: ANN401
    ) -> None:
        """Make the frames of the message."""
        content = {"data": data or {}, "comm_id": self.comm_id, **keys}
        parent = self.session.msg_header("execute_request")
        message = self.session.msg(msg_type, content, parent, metadata=metadata)
        frames = [*self.session.serialize(message, ident=b"comm-" + b"0" * 32), *(buffers or [])]
        Wire.total += sum(len(frame) for frame in frames)


def record(writer: Writer, step: int, values: np.ndarray) -> None:
    """One more step; its weights are sent, and at every tenth they are saved."""
    writer.step(StepRecord(step, dict(zip(NAMES, values.tolist(), strict=True))))
    writer.event("sync", "weights sent to the sampler", step=step)
    if step % 10 == 0:
        writer.event("checkpoint", f"saved as step-{step}", step=step)


def measure(folder: Path, history: int, steps: int) -> tuple[float, float, float, float]:
    """Cost of ``steps`` further steps behind ``history`` others.

    Returns:
        Bytes and milliseconds of CPU per step; kilobytes and milliseconds of one snapshot.
    """
    values = np.random.default_rng(0).normal(size=(history + steps, len(NAMES)))
    store = Store(folder)
    reader = store.import_frame(pd.DataFrame(values[:history], columns=NAMES), name=str(history))
    spent = 0.0
    with store.resume(reader.info.id, after=history, total=history + steps) as writer:
        view = RunView([reader])
        SENDER.discard(view.dashboard)  # updated here, where the clock is
        view.dashboard.update()
        Wire.total = 0
        for step in range(history + 1, history + steps + 1):
            record(writer, step, values[step - 1])
            start = time.thread_time()
            sent = view.dashboard.update()
            spent += time.thread_time() - start
            assert sent
    sent = Wire.total
    start = time.thread_time()
    size = sum(len(run["data"]) for run in view.dashboard.everything()["runs"])
    snapshot = time.thread_time() - start
    view.close()
    return sent / steps, 1000 * spent / steps, size / 1000, 1000 * snapshot


def main() -> int:
    """Print the table; 1 if a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps to measure")
    steps = parser.parse_args().steps
    comm.create_comm = Wire  # what ipywidgets opens a channel with
    kept = True
    _say(f"{len(NAMES)} metrics; {steps} steps, each an update of its own")
    _say("history   bytes/step   CPU ms/step   snapshot kB   snapshot ms")
    with tempfile.TemporaryDirectory() as folder:
        for history in HISTORIES:
            size, cpu, whole, once = measure(Path(folder), history, steps)
            kept &= size <= MOST_BYTES and cpu <= MOST_MS
            _say(f"{history:7}   {size:10.0f}   {cpu:11.2f}   {whole:11.0f}   {once:11.0f}")
    _say(f"budgets of {MOST_BYTES} bytes and {MOST_MS:g} ms: {'kept' if kept else 'EXCEEDED'}")
    return int(not kept)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
