import math
import re
from html.parser import HTMLParser

import pytest

from xorl_lab.errors import ConfigError
from xorl_lab.recipes.charts import PANELS, Chart, figure, series
from xorl_lab.recipes.evaluate import Evaluation
from xorl_lab.recipes.outcome import outcome
from xorl_lab.recipes.report import RunReport, render_html, write_report
from xorl_lab.recipes.tables import LONGEST
from xorl_lab.types import Group, Rollout, StepRecord

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">&amp;`</pre>\u2028'


def rollout(text, reward=1.0, error=None):
    return Rollout([1], [-1.0], text, "stop", 0, reward, error=error)


def group(text, reward=1.0, prompt="2+2="):
    return Group(prompt, [1], [rollout(text, reward)], {"answer": "4"})


def record(step, **metrics):
    seconds = {"seconds:sample": 1.0, "seconds:train": 2.0, "seconds:total": 3.0}
    given = {"reward": step / 10, "loss:mean": 0.1, "kl_base": 0.01 * step}
    return StepRecord(step, given | seconds | metrics, [group("4")])


RECORDS = [record(i) for i in range(1, 11)]


def full_report(**changes):
    given = {
        "title": "Title",
        "records": RECORDS,
        "settings": {"learning_rate": 1e-3},
        "environment": {"device": "cpu", "dtype": "float32"},
        "before": Evaluation([group("5", 0.0)]),
        "after": Evaluation([group("4")]),
    }
    return RunReport(**(given | changes))


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.text = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def without_plotly(page):
    """The page without the library, which is 5 MB that somebody else wrote."""
    start = page.index("<script>")
    return page[:start] + page[page.index("</script>", start) :]


def test_the_page_shows_numbers_completions_settings_and_environment():
    page = without_plotly(render_html(full_report(note="Interrupted.")))
    for text in ("0.00 → 1.00", "0.30 → 0.80", "learning_rate", "0.001", "float32", "Interrupted."):
        assert text in page
    assert page.count("2+2=") == 3
    assert 'class="bad">✗ 0.00' in page
    assert 'class="good">✓ 1.00' in page


def test_everything_from_a_model_is_escaped():
    evil = Group(EVIL, [1], [rollout(EVIL), rollout(EVIL, None, EVIL)], {"answer": EVIL})
    records = [StepRecord(1, {"reward": 1.0}, [evil], [EVIL])]
    both = Evaluation([evil])
    page = render_html(
        full_report(
            title=EVIL,
            records=records,
            settings={EVIL: EVIL},
            environment={EVIL: EVIL},
            before=both,
            after=both,
            note=EVIL,
        )
    )
    elements = Elements(without_plotly(page))
    assert "<script>alert" not in page
    assert not [tag for tag, _ in elements.found if tag == "img"]
    assert not [a for _, attributes in elements.found for a in attributes if a.startswith("on")]
    assert sum(text.count("alert(1)") for text in elements.text) >= 10
    clean = Elements(without_plotly(render_html(full_report(before=None, after=None))))
    scripts = [tag for tag, _ in elements.found if tag == "script"]
    assert len(scripts) == len([tag for tag, _ in clean.found if tag == "script"])


def test_nothing_is_asked_of_the_network():
    page = render_html(full_report())
    assert page.count("plotly.js v") == 1
    elements = Elements(without_plotly(page))
    for _, attributes in elements.found:
        assert not {"src", "href"} & set(attributes)
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\(", without_plotly(page))


def test_a_very_long_text_is_cut():
    long = Evaluation([group("x" * 70_000)])
    page = without_plotly(render_html(full_report(before=long, after=long)))
    assert "x" * LONGEST in page
    assert "x" * (LONGEST + 1) not in page
    assert "68,000 more characters" in page


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_leave_gaps(value):
    records = [record(1), record(2, reward=value, kl_base=value), record(3)]
    assert series(records, "reward") == [0.1, None, 0.3]
    page = without_plotly(render_html(full_report(records=records)))
    assert not re.search(r"\b(NaN|Infinity)\b", page)


def test_a_report_of_nothing():
    page = without_plotly(render_html(RunReport("Nothing", [])))
    assert "<h1>Nothing</h1>" in page
    assert "–" in page


def test_supervised_steps_have_no_reward():
    records = [StepRecord(i, {"loss:mean": 1.0 / i, "seconds:total": 1.0}) for i in (1, 2)]
    page = without_plotly(render_html(RunReport("SFT", records)))
    assert "Completions while training" not in page


def test_warnings_are_listed_once_with_their_steps():
    records = [record(1), StepRecord(2, {}, warnings=["all <b>equal</b>"])]
    page = render_html(full_report(records=records))
    assert "<li>step 2: all &lt;b&gt;equal&lt;/b&gt;</li>" in page
    often = [StepRecord(i, {}, warnings=["equal"]) for i in range(1, 13)]
    page = render_html(full_report(records=often))
    assert "<li>steps 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 others: equal</li>" in page


def test_figure_draws_what_was_measured():
    records = [record(1), record(2, **{"held_out:accuracy": 0.5})]
    names = {trace.name for trace in figure(records).data}
    assert names == {
        "mean reward",
        "held-out accuracy",
        "KL to the base model",
        "loss",
        "sample",
        "train",
    }
    assert {t.name for t in figure(records, panels=("reward",)).data} == {
        "mean reward",
        "held-out accuracy",
    }
    assert list(figure([]).data) == []
    assert len(PANELS) == 4


def test_a_panel_that_is_not_there():
    with pytest.raises(ConfigError, match="panel is 'speed': choose from kl, loss, reward, time"):
        figure(RECORDS, panels=("speed",))


def test_a_chart_is_an_explorable_figure_and_a_table_with_constant_text():
    shown = Chart([*RECORDS, record(11, reward=math.nan)], panels=("reward", "kl"))
    bundle = shown._repr_mimebundle_()
    assert bundle["application/vnd.plotly.v1+json"]["data"][0]["name"] == "mean reward"
    assert bundle["text/plain"] == repr(shown) == "Chart of a run"
    assert "<th>step</th><th>mean reward</th><th>KL to the base model</th>" in bundle["text/html"]
    assert "<td>10</td><td>1.000</td><td>0.100</td>" in bundle["text/html"]
    assert "<td>11</td><td>–</td>" in bundle["text/html"]


def test_what_all_prompts_begin_with_is_shown_once():
    shots = "1+1=2\n2+1=3\n"
    both = Evaluation([group("4", prompt=shots + "3+1="), group("5", prompt=shots + "3+2=")])
    page = without_plotly(render_html(full_report(records=[], before=both, after=both)))
    assert page.count("1+1=2") == 1
    assert "<td><pre>3+2=</pre></td>" in page


def test_a_blank_setting_is_quoted():
    assert "<th>stop</th><td>&#x27;\\n&#x27;</td>" in render_html(
        full_report(settings={"stop": "\n"})
    )


def test_writing_makes_folders(tmp_path):
    path = write_report(tmp_path / "a" / "b.html", full_report())
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_outcome_and_verdict():
    result = outcome(RECORDS, Evaluation([group("5", 0.0)]), Evaluation([group("4")]))
    assert (result.steps, result.rise) == (10, 1.0)
    assert result.reward_first == pytest.approx(0.3)
    assert result.reward_last == pytest.approx(0.8)
    assert result.seconds == 30
    assert result.judge(reward=0.75, rise=0.25) == [
        "yes: mean reward of the last 5 steps >= 0.75",
        "yes: held-out accuracy rose by >= 0.25",
    ]
    assert result.judge(reward=0.9, rise=0.25)[0].startswith("no: ")
    unmeasured = outcome([])
    assert math.isnan(unmeasured.reward_last)
    assert [v[:3] for v in unmeasured.judge(reward=0, rise=0)] == ["no:", "no:"]
