import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.support import EXAMPLES, PROMPTS, SUPERVISED, grpo, lab_in, share
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


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Names of the metrics of real runs: reinforcement with all options, and supervised."""
    lab = lab_in(tmp_path_factory.mktemp("real"))
    known = {"held_out": PROMPTS[:1], "evaluate_every": 1, "report_base_kl": True}
    loss = {"kl_coef": 0.1, "loss_fn_params": {"use_tis": True, "icepop_beta": 5.0}}
    parts = lambda completion, wanted: {  # noqa: E731
        "correct": share(completion, wanted),
        "format": 0.0,
        "brevity": 0.1,
    }
    reinforced = grpo(lab, 1, reward=parts, **known, **loss)
    supervised = lab.sft(EXAMPLES, held_out=EXAMPLES[:1], steps=1, **SUPERVISED)
    return list(reinforced.metrics.columns), list(supervised.metrics.columns)


def test_no_metric_of_these_tests_is_invented(real):
    assert set(NAMES) <= set(real[0])


def test_real_runs_have_the_panels_that_one_looks_for(real):
    reinforced, supervised = real
    assert [p.key for p in panels(reinforced)] == [p.key for p in panels(NAMES)]
    lines = {p.key: [line.name for line in p.lines] for p in panels(reinforced)}
    assert lines["memory"] == ["memory:process"]
    assert lines["kl"] == ["kl_sampler", "kl_base", "kl_ref", "kl_sample_train_k3"]
    assert lines["ratio"] == ["ratio_mean", "tis_mean"]
    shown = [p.key for p in panels(supervised) if p.section != MORE]
    assert shown == ["loss", "grad", "time", "speed", "memory", "rate"]


def test_memory_is_told_of_the_process_and_of_the_gpu():
    panel = find("memory", ["memory:device", "memory:process"])
    assert [line.label for line in panel.lines] == ["of the process", "on the GPU"]
    assert panel.unit == "bytes"


def test_a_total_without_parts_is_drawn():
    (panel,) = panels(["seconds:step"])
    assert (panel.key, [line.name for line in panel.lines]) == ("time", ["seconds:step"])
    assert [line.label for line in find("time", ["seconds:step", "seconds:mine"]).lines] == ["mine"]


def test_time_is_stacked_without_the_total():
    lines = find("time").lines
    assert [line.label for line in lines] == ["sample", "score", "train", "sync", "evaluate"]
    assert {line.shape for line in lines} == {"stack"}


def test_whatever_else_there_is_goes_to_more():
    more = [p for p in panels([*NAMES, "mine", "mine:a", "mine:b"]) if p.section == MORE]
    drawn = {line.name for panel in more for line in panel.lines}
    assert {"mine", "mine:a", "mine:b", "grad_scale", "kl_base_abs", "loss:sum"} <= drawn
    assert next(p for p in more if p.key == "more:mine").title == "Mine"


def test_what_a_loop_of_one_s_own_logs_comes_first():
    found = panels(["accuracy", "z", "seconds:step", "memory:process"])
    assert [(p.title, p.section) for p in found[:2]] == [("Accuracy", "main"), ("Z", "main")]
    assert {p.section for p in found} == {"main"}


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


def test_parts_that_spill_over_keep_their_bands():
    names = [f"reward:part:{i}{edge}" for i in range(9) for edge in ("", ":std", ":min", ":max")]
    lines = [line for panel in panels(["reward", *names]) for line in panel.lines]
    assert len(lines) == 10
    assert {(li.spread, li.low, li.high) for li in lines if li.name != "reward"} == {
        tuple(f"reward:part:{i}:{edge}" for edge in ("std", "min", "max")) for i in range(9)
    }


NAME = st.from_regex(r"[a-z_]{1,8}(:[a-z_]{1,6}){0,2}", fullmatch=True)


PART = st.from_regex(r"(reward:part|memory|mine):[a-e](_mean)?", fullmatch=True)
EDGE = st.sampled_from(["", ":std", ":min", ":max", "_min", "_max"])


@given(
    st.lists(
        st.one_of(st.sampled_from(NAMES), NAME, st.builds(str.__add__, PART, EDGE)),
        unique=True,
        max_size=60,
    )
)
def test_nothing_is_drawn_twice_and_nothing_is_lost(names):
    found = panels(names)
    used = [n for p in found for li in p.lines for n in (li.name, li.spread, li.low, li.high) if n]
    assert len(used) == len(set(used))
    left_out = {"loss_sum", "loss_mean", "token_count", "seconds:total", "seconds:step"}
    assert set(names) - left_out <= set(used) | left_out
    assert len({p.key for p in found}) == len(found)
    assert len({p.key for p in panels(names, several=True)}) == len(panels(names, several=True))
