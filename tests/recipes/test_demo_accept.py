"""What the demo promises, on the real model: three seeds, minutes each."""

import pytest

from xorl_lab.recipes.demo import MODEL, DemoOptions, run_demo

REWARD = 0.8
RISE = 0.25
SECONDS = 360


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_model_learns_to_add(seed, tmp_path, capsys):
    options = DemoOptions(seed=seed, report=tmp_path / "report.html")
    result = run_demo(options)
    with capsys.disabled():
        print(f"\n{MODEL}: {result.to_dict()}")  # noqa: T201 (the measurement is the point)
    assert result.outcome.judge(reward=REWARD, rise=RISE) == [
        "yes: mean reward of the last 5 steps >= 0.8",
        "yes: held-out accuracy rose by >= 0.25",
    ]
    assert result.outcome.seconds < SECONDS
    assert "Held-out prompts, before and after" in result.report.read_text()
