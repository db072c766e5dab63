"""What the store may cost.  Run with -s to see the numbers."""

import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.store.support import record
from xorl_lab.store import Store
from xorl_lab.types import Group, Rollout, StepRecord

IMPORT = """
import sys, time
begin = time.process_time()
import numpy
numpys = time.process_time() - begin
import xorl_lab.types
start = time.process_time()
import xorl_lab.store
print((time.process_time() - start) / numpys)
heavy = {"torch", "transformers", "peft", "pandas", "plotly", "IPython", "pyarrow"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""


def test_importing_is_cheap():
    done = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    # About 0.1 seconds; a processor that others use as well is slower for both of them.
    assert min(float(d.stdout) for d in done) < 1, "as much processor time as numpy takes"


def timed(act):
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "top"),
    [
        ((), 0),
        (("trainer_logprobs", "ref_logprobs", "entropies", "ratio", "flags"), 0),
        (("trainer_logprobs", "entropies", "ratio", "flags"), 5),
    ],
    ids=["ids and logprobs", "five more streams", "all that a recipe records"],
)
def test_a_step_of_64_rollouts_of_256_tokens_is_recorded_in_20_ms(store, streams, top):
    more = {"streams": streams, "top": top}
    records = [record(s, groups=8, size=8, length=256, **more) for s in range(1, 61)]
    raw = 64 * 256 * 4 * (2 + len(streams) + 2 * top)
    with store.create(name="run", kind="grpo", model="tiny") as writer:
        writer.step(records[0])
        seconds = [timed(lambda r=r: writer.step(r)) for r in records[1:]]
    middle, late = statistics.median(seconds), sorted(seconds)[int(0.95 * len(seconds))]
    size = store.disk_bytes() / len(records)
    print(  # noqa: T201
        f"\nrecord a step with {len(streams)} streams and {top} alternatives: median "
        f"{middle * 1e3:.1f} ms, 95 % {late * 1e3:.1f} ms; {size / 1e3:.0f} kB per step "
        f"({raw / 1e3:.0f} kB of raw values)"
    )
    assert middle < 0.020


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A run of 100,000 rollouts beside another one."""
    store = Store(tmp_path_factory.mktemp("large"))
    rng = np.random.default_rng(0)
    rewards = rng.random((400, 250, 4))
    with (
        store.create(name="large", kind="grpo", model="tiny") as writer,
        store.create(name="other", kind="grpo", model="tiny") as other,
    ):
        for step in range(1, 401):
            drawn = [
                Rollout(
                    [1, 2, 3], [-a, -b, -c], f"text {d}", "stop" if a > b else "length", step, a,
                    {"format": b, "answer": c}, d, None, {"entropy": [a, b, d]},
                )
                for a, b, c, d in rewards[step - 1].tolist()
            ]  # fmt: skip
            writer.step(StepRecord(step, {"reward": 0.5}, [Group("prompt", [1, 2], drawn)]))
            other.step(record(step))
    return store.run("large")


@pytest.mark.slow
def test_100_000_rollouts_are_filtered_and_sorted_in_200_ms(large):
    assert large.count() == 100_000
    where = [("reward", ">", 0.2), ("reward:part:format", "<", 0.9)]
    large.rollouts(where=where, limit=50)
    for name in large.rollout_columns():
        best = min(
            timed(lambda n=name: large.rollouts(where=where, order_by=n, descending=True, limit=50))
            for _ in range(3)
        )
        plain = min(timed(lambda n=name: large.rollouts(order_by=n, limit=50)) for _ in range(3))
        print(f"\n{name}: filtered {best * 1e3:.0f} ms, all {plain * 1e3:.0f} ms", end="")  # noqa: T201
        assert best < 0.2
        assert plain < 0.2


@pytest.mark.slow
def test_100_000_steps_are_read_quickly_and_the_next_ones_at_once(store):
    columns = {f"metric {i}": np.random.default_rng(i).random(100_000) for i in range(40)}
    import pandas as pd

    frame = pd.DataFrame(columns)
    write = timed(lambda: store.import_frame(frame, name="run"))
    reader = store.run("run")
    whole = timed(reader.scalars)
    last = min(timed(lambda: reader.scalars(after=99_999)) for _ in range(5))
    _, seen = reader.changed(None)
    poll = min(timed(lambda: reader.changed(seen)) for _ in range(20))
    np.testing.assert_array_equal(reader.metrics().to_numpy(), frame.to_numpy())
    print(  # noqa: T201
        f"\nimport {write:.2f} s, all {whole * 1e3:.0f} ms, last step {last * 1e3:.2f} ms, "
        f"poll {poll * 1e6:.0f} us"
    )
    assert whole < 1.0
    assert last < 0.005
    assert poll < 0.001
