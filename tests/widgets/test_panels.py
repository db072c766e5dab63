from hypothesis import given
from hypothesis import strategies as st

from tests.widgets.runs import metrics
from xorl_lab.widgets.panels import MORE, panels

NAMES = list(metrics(10))


def keys(names, **options):
    return [panel.key for panel in panels(names, **options)]


def find(key, names=NAMES):
    return next(panel for panel in panels(names) if panel.key == key)


def test_a_run_of_grpo_has_the_panels_that_one_looks_for():
    shown = [panel.key for panel in panels(NAMES) if panel.section == "main"]
    assert shown == [
        "reward",
        "loss",
        "kl",
        "entropy",
        "clipped",
        "ratio",
        "grad",
        "length",
        "truncated",
        "signal",
        "time",
        "speed",
        "memory",
        "rate",
    ]


def test_a_supervised_run_shows_what_it_has():
    names = ["loss:mean", "held_out:loss", "grad_norm", "seconds:train", "seconds:total"]
    assert keys(names) == ["loss", "grad", "time"]


def test_reward_has_its_spread_and_each_named_part():
    lines = find("reward").lines
    assert [line.name for line in lines] == [
        "reward",
        "held_out:accuracy",
        "held_out:reward",
        "reward:part:brevity",
        "reward:part:correct",
        "reward:part:format",
    ]
    assert (lines[0].spread, lines[0].low, lines[0].high) == (
        "reward:std",
        "reward:min",
        "reward:max",
    )
    assert lines[1].shape == "points"


def test_ratio_has_its_range():
    (line,) = find("ratio").lines
    assert (line.low, line.high) == ("ratio_min", "ratio_max")


def test_time_is_stacked_without_the_total():
    lines = find("time").lines
    assert [line.label for line in lines] == ["sample", "score", "train", "sync", "evaluate"]
    assert {line.shape for line in lines} == {"stack"}


def test_whatever_else_there_is_goes_to_more():
    more = [p for p in panels([*NAMES, "mine", "mine:a", "mine:b"]) if p.section == MORE]
    drawn = {line.name for panel in more for line in panel.lines}
    assert {"mine", "mine:a", "mine:b", "grad_scale", "kl_base_abs", "loss:sum"} <= drawn
    assert next(p for p in more if p.key == "more:mine").title == "Mine"


def test_several_runs_have_one_line_per_panel():
    single = panels(NAMES, several=True)
    assert all(len(panel.lines) == 1 for panel in single)
    assert "Reward: correct" in [panel.title for panel in single]
    assert "stack" not in {panel.lines[0].shape for panel in single}


def test_many_parts_spill_over():
    names = ["reward", *(f"reward:part:{i:02}" for i in range(20))]
    found = panels(names)
    assert max(len(panel.lines) for panel in found) <= 6
    assert {line.name for panel in found for line in panel.lines} == set(names)


NAME = st.from_regex(r"[a-z_]{1,8}(:[a-z_]{1,6}){0,2}", fullmatch=True)


@given(st.lists(st.one_of(st.sampled_from(NAMES), NAME), unique=True))
def test_nothing_is_drawn_twice_and_nothing_is_lost(names):
    found = panels(names)
    used = [n for p in found for li in p.lines for n in (li.name, li.spread, li.low, li.high) if n]
    assert len(used) == len(set(used))
    left_out = {"loss_sum", "loss_mean", "token_count", "seconds:total"}
    assert set(names) - left_out <= set(used) | left_out
    assert len({p.key for p in found}) == len(found)
    assert len({p.key for p in panels(names, several=True)}) == len(panels(names, several=True))
