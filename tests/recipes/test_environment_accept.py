"""A real model learns to use a tool: minutes."""

import pytest

from xorl_lab.recipes.demo import MODEL, DemoOptions, run_demo


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_model_learns_to_ask_the_calculator(seed, tmp_path, capsys):
    options = DemoOptions(seed=seed, task="multiplication", report=tmp_path / "report.html")
    result = run_demo(options)
    with capsys.disabled():
        print(f"\n{MODEL}: {result.to_dict()}")  # noqa: T201 (the measurement is the point)
    assert result.outcome.judge(reward=0.8, rise=0.25) == [
        "yes: mean reward of the last 5 steps >= 0.8",
        "yes: held-out accuracy rose by >= 0.25",
    ]
