"""What is made of a run after the fact: picture, table, figure, one-file page."""

import base64
import io
import json
import math
import re

import pytest

from tests.widgets import runs
from xorl_lab.errors import ConfigError
from xorl_lab.types import StepRecord
from xorl_lab.widgets import export_html, fallback_html, figure

EVIL = '</script><img src=x onerror="alert(1)">'


@pytest.fixture
def run(tmp_path):
    store, name = runs.finished(tmp_path / "store", 200)
    return store.run(name)


@pytest.fixture
def evil(store):
    with store.create(name=EVIL, kind="grpo", model=EVIL) as writer:
        writer.step(StepRecord(1, {"reward": 0.5, EVIL: math.inf}, warnings=[EVIL]))
        writer.event("error", EVIL, step=1)
        writer.status("failed", EVIL)
    return store.run(writer.info.id)


def test_fallback_has_a_picture_and_a_table(run):
    html = fallback_html(run)
    data = re.search(r'src="data:image/png;base64,([^"]+)"', html)[1]
    assert io.BytesIO(base64.b64decode(data)).read(8) == b"\x89PNG\r\n\x1a\n"
    assert "<b>addition</b>: finished, step 200 of 200" in html
    assert "<td>Gradient norm</td>" in html
    assert len(html) < 200_000
    assert not re.search(r"<script|<style|<svg|https?:", html)


def test_fallback_escapes_whatever_is_said(evil):
    html = fallback_html(evil)
    assert "onerror=&quot;" in html
    assert "<img src=x" not in html
    assert "ended by an error" in html


def test_fallback_of_a_run_without_a_step(store):
    with store.create(name="empty", kind="sft", model="tiny") as writer:
        assert "running, step 0" in fallback_html(store.run(writer.info.id))


def test_figure_draws_the_panels(run):
    fig = figure([run])
    names = [trace.name for trace in fig.data if trace.name]
    assert {"mean", "correct", "loss", "to base", "sample"} <= set(names)
    assert fig.layout.annotations[0].text == "Reward"


def test_figure_of_chosen_metrics_of_several_runs(tmp_path, run):
    store, name = runs.finished(tmp_path / "other", 40, name="other", seed=3)
    fig = figure([run, store.run(name)], ["reward", "kl_base"])
    assert [trace.name for trace in fig.data] == ["addition", "other"] * 2
    colours = {trace.line.color for trace in fig.data}
    dashes = {trace.line.dash for trace in fig.data}
    assert len(colours) == len(dashes) == 2


def test_figure_refuses_what_is_not_there(run):
    with pytest.raises(ConfigError, match=r"no metric 'rewrad': choose from .*reward"):
        figure([run], ["rewrad"])
    with pytest.raises(ConfigError, match="no runs"):
        figure([])


def test_export_is_one_file_without_network(run, tmp_path):
    path = export_html([run], tmp_path / "run.html")
    page = path.read_text()
    assert "default-src 'none'" in page
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert loaded == []
    snapshot = json.loads(re.search(r'id="snapshot">(.*?)</script>', page)[1])
    assert snapshot["runs"][0]["rows"] == 200


def test_export_escapes_whatever_is_said(evil, tmp_path):
    page = export_html([evil], tmp_path / "run.html").read_text()
    assert "<img src=x" not in page
    assert page.count("</script>") == 3
    snapshot = json.loads(re.search(r'id="snapshot">(.*?)</script>', page)[1])
    assert snapshot["runs"][0]["name"] == EVIL
