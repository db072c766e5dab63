"""What the inspector of rollouts costs in a real browser.

    python -m benchmarks.inspector [--rollouts 100000] [--tokens 25000]

JupyterLab with Chromium, from the click to the frame in which everything asked for is drawn.
Budgets: a rollout of 25,000 tokens opens in 300 ms and is coloured anew in 100 ms, and scrolling
through 100,000 rollouts keeps the 95th percentile of frames under 50 ms.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.widgets import rollouts
from tests.widgets.jupyter import Notebook, Server, browser
from xorl_lab.store import Store
from xorl_lab.types import Alternatives, Group, Rollout, StepRecord

OPEN_MS, RECOLOUR_MS, FRAME_MS = 300.0, 100.0, 50.0
REPEATS = 5
SHOW = """
from pathlib import Path
from tests.widgets import rollouts
from xorl_lab.store import Store
from xorl_lab.widgets import RolloutInspector
view = RolloutInspector([Store(Path("{name}")).run("bench")], rollouts.Commands())
view
"""
# To the end of the frame in which a change is painted.
PAINTED = "const painted = () => new Promise(go => requestAnimationFrame(() => setTimeout(go)));"
OPEN = f"""async line => {{ {PAINTED}
  const opened = () => document.querySelector('.xl-inspector').dataset.opened;
  const before = opened(), start = performance.now();
  document.querySelector(`.xl-tr[data-line="${{line}}"]`).click();
  while (opened() === before) await new Promise(go => setTimeout(go, 1));
  await painted();
  const [, answer, draw] = opened().split(' ').map(Number);
  const whole = performance.now() - start;
  return [whole, answer, whole - answer, draw];
}}"""
RECOLOUR = f"""async key => {{ {PAINTED}
  const button = document.querySelector(`.xl-segment[data-key="${{key}}"]`);
  const start = performance.now();
  button.click();
  await painted();
  return performance.now() - start;
}}"""
SCROLL = """async () => {
  const table = document.querySelector('.xl-table'), frames = [];
  let last = performance.now();
  for (let i = 1; i <= 180; i += 1) {
    table.scrollTop = i < 90 ? i * 700 : (i - 90) * table.scrollHeight / 90;
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
  }
  frames.sort((a, b) => a - b);
  const start = performance.now();
  while (!document.querySelector('.xl-tr[data-id]')) await new Promise(go => setTimeout(go, 1));
  return [frames[90], frames[171], frames.at(-1), performance.now() - start];
}"""


def long_rollout(tokens: int, seed: int) -> Rollout:
    """A rollout with every stream, mostly words, some of it other scripts and emoji."""
    text = "so the answer is 72 because 27 plus 45 makes it 漢字 👍🏽 caf\u0065\u0301\n"
    own = rollouts.TOKENIZER.encode(text)
    ids = (own * (tokens // len(own) + 1))[:tokens]
    logprobs, streams = rollouts.streams(ids, seed, masked=0.02)
    top = Alternatives(*rollouts.top(ids, logprobs, seed))
    return Rollout(
        ids, logprobs.tolist(), text, "length", 1, 0.5, streams=streams, top_logprobs=top
    )


def fill(folder: Path, count: int, tokens: int) -> None:
    """A run of ``count`` short rollouts, and five long ones in its last step."""
    draw = np.random.default_rng(0)
    prompt = rollouts.TOKENIZER.encode("What is 27 + 45?")
    text = rollouts.CLEAN[1]
    ids = rollouts.TOKENIZER.encode(text)
    with Store(folder).create(name="bench", kind="grpo", model="tiny") as writer:
        for step in range(1, count // 200 + 1):
            rewards = draw.normal(0.5, 0.2, 200).tolist()
            drawn = [Rollout(ids, [-0.5] * len(ids), text, "stop", step, r) for r in rewards]
            groups = [Group("What is 27 + 45?", prompt, drawn[i : i + 8]) for i in range(0, 200, 8)]
            writer.step(StepRecord(step, {}, groups))
        long = [Group("long", prompt, [long_rollout(tokens, i)]) for i in range(REPEATS + 1)]
        writer.step(StepRecord(count // 200 + 1, {}, long))
        writer.status("finished")


def measure(folder: Path, count: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of each deed, the median of several."""
    root = Path(__file__).resolve().parents[1]
    server = Server(folder, root)
    try:
        fill(server.work / "runs", count, tokens)
        server.write("bench.ipynb", [SHOW.format(name="runs")])
        with browser() as chrome:
            page = chrome.new_page(viewport={"width": 1200, "height": 1200})
            notebook = Notebook(page, server, "bench.ipynb")
            notebook.idle()
            notebook.run(0, seconds=120)
            notebook.wait("() => document.querySelector('.xl-tr[data-id]')")
            page.evaluate(OPEN, 0)  # the first is to warm up
            opened = np.array([page.evaluate(OPEN, line) for line in range(1, REPEATS + 1)])
            keys = ("gap", "kl", "entropy", "ratio", "logprob")
            page.wait_for_timeout(2000)
            recoloured = np.array([page.evaluate(RECOLOUR, key) for key in keys])
            return {
                "open": np.median(opened, 0),
                "recolour": (float(np.median(recoloured)), float(recoloured.max())),
                "scroll": page.evaluate(SCROLL),
            }
    finally:
        server.close()


def main() -> int:
    """Print the table; 1 if a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=100_000, help="in the table")
    parser.add_argument("--tokens", type=int, default=25_000, help="of the long rollouts")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.rollouts, options.tokens)
    whole, answer, page, draw = found["open"]
    median, worst = found["recolour"]
    usual, slow, slowest, last = found["scroll"]
    _say(f"a rollout of {options.tokens:,} tokens, from click to paint: {whole:.0f} ms")
    _say(f"  of which kernel and wire {answer:.0f} ms, in the page {page:.0f} ms: {draw:.0f} ms to")
    _say("  build it, the rest to lay it out and paint it")
    _say(f"coloured anew: {median:.0f} ms, at worst {worst:.0f} ms")
    _say(f"frames while scrolling through {options.rollouts:,} rollouts:")
    _say(f"  median {usual:.0f} ms, 95th percentile {slow:.0f} ms, slowest {slowest:.0f} ms;")
    _say(f"  rows are there {last:.0f} ms after the last jump")
    kept = page <= OPEN_MS and worst <= RECOLOUR_MS and slow <= FRAME_MS
    _say(f"budgets {'kept' if kept else 'EXCEEDED'}; {time.monotonic() - start:.0f} s in all")
    return int(not kept)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
