"""What is made of a run after the fact: picture, table, figure, one-file page."""

import base64
import html
import io
import json
import math
import re

import numpy as np
import pytest
from PIL import Image

from tests.widgets import runs
from xorl_lab.errors import ConfigError
from xorl_lab.types import StepRecord
from xorl_lab.widgets import export_html, fallback, fallback_html, figure
from xorl_lab.widgets.bands import widened
from xorl_lab.widgets.colours import COLOURS
from xorl_lab.widgets.feed import Feed
from xorl_lab.widgets.history import History
from xorl_lab.widgets.panels import Line, Panel
from xorl_lab.widgets.picture import png, writing

EVIL = '</script><img src=x onerror="alert(1)">'
NAMES = (EVIL, r"$\frac$", "$$", "_hidden", "<think>", "<b>fat</b>&amp;", "字😀\n", "x" * 200)
"""Names of parts of a reward that somebody may read as something else."""


@pytest.fixture
def run(tmp_path):
    store, name = runs.finished(tmp_path / "store", 200)
    return store.run(name)


@pytest.fixture
def evil(store):
    with store.create(name=EVIL, kind="grpo", model=EVIL) as writer:
        parts = {f"reward:part:{name}": 0.25 for name in NAMES[:5]}
        times = {f"seconds:{name}": 0.25 for name in NAMES[5:]}
        metrics = {"reward": 0.5, EVIL: math.inf} | parts | times
        writer.step(StepRecord(1, metrics, warnings=[EVIL]))
        writer.event("error", EVIL, step=1)
        writer.status("failed", EVIL)
    return store.run(writer.info.id)


def test_fallback_has_a_picture_and_a_table(run):
    html = fallback_html(run)
    data = re.search(r'src="data:image/png;base64,([^"]+)"', html)[1]
    assert io.BytesIO(base64.b64decode(data)).read(8) == b"\x89PNG\r\n\x1a\n"
    assert "<b>addition</b>: finished, step 200 of 200" in html
    assert "<td>Gradient norm</td>" in html
    assert "<td>of the process</td>" in html
    assert len(html) < 200_000
    assert not re.search(r"<script|<style|<svg|https?:", html)


def test_fallback_escapes_whatever_is_said(evil):
    html = fallback_html(evil)
    assert "onerror=&quot;" in html
    assert "<img src=x" not in html
    assert "ended by an error" in html


def test_labels_are_drawn_as_they_are(evil):
    page = fallback_html(evil)
    assert "could not be drawn" not in page
    assert "data:image/png;base64," in page
    for name in NAMES:
        assert f"<td>{html.escape(name)}</td>" in page


def test_labels_have_only_what_the_font_has():
    write = writing()
    assert write("字🫠\nab") == "□□□ab"
    assert write("x" * 29) == "x" * 27 + "…"


def test_a_picture_that_cannot_be_drawn_leaves_the_table(run, monkeypatch):
    monkeypatch.setattr(fallback, "png", lambda *_: 1 / 0)
    page = fallback_html(run)
    assert "could not be drawn: ZeroDivisionError" in page
    assert "<img" not in page
    assert "<td>Gradient norm</td>" in page


def ink(data, colour):
    """(rows, columns) where a picture has a colour, nearly."""
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA")).astype(int)
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    near = np.abs(pixels[..., :3] - wanted).max(axis=-1) < 24
    return np.argwhere(near & (pixels[..., 3] > 128))


def test_a_picture_of_a_long_run_keeps_each_extreme(store):
    feed = Feed(store.run(runs.finished(store.path.parent, 1)[1]))
    values = np.zeros(5000)
    values[[1001, 3333]] = 1.0, -1.0
    feed.history = History()
    feed.history.extend(np.arange(1, 5001), {"a": values})
    marks = ink(png(feed, [Panel("a", "A", "", "main", [Line("a", "a")])]), COLOURS[0])
    assert np.ptp(marks[:, 0]) > 100  # of 168 pixels


def test_parts_of_a_whole_are_stacked_in_the_picture(store):
    feed = Feed(store.run(runs.finished(store.path.parent, 1)[1]))
    feed.history = History()
    feed.history.extend(np.arange(1, 4), {"a": np.ones(3), "b": np.ones(3)})
    lines = [Line(name, name, "stack") for name in "ab"]
    data = png(feed, [Panel("t", "T", "s", "main", lines)])
    first, second = (np.median(ink(data, c)[:, 0]) for c in COLOURS[:2])
    assert first - second > 40


def test_a_band_is_as_wide_as_what_its_rows_stand_for():
    history = History()
    values = np.array([0.0, 5, 1, 2, -3, 4, 0, 0, 9, 9])
    history.extend(np.arange(1, 11), {"a": values})
    table = history.thin(6, tail=2)
    low, high = widened((table.column("a"), table.column("a")), table)
    exact = table.steps >= table.exact
    assert low[~exact].reshape(-1, 2).min(axis=1).tolist() == low[~exact][::2].tolist()
    assert (high[~exact][::2] >= low[~exact][::2]).all()
    assert high[exact].tolist() == table.column("a")[exact].tolist()
    assert (low.min(), high.max()) == (-3.0, 9.0)


def test_fallback_of_a_run_without_a_step(store):
    with store.create(name="empty", kind="sft", model="tiny") as writer:
        assert "running, step 0" in fallback_html(store.run(writer.info.id))


def test_figure_draws_the_panels(run):
    fig = figure([run])
    names = [trace.name for trace in fig.data if trace.name]
    assert {"mean", "correct", "loss", "to base", "sample"} <= set(names)
    assert fig.layout.annotations[0].text == "Reward"


def test_figure_shows_names_as_they_are(evil):
    shown = [trace.name for trace in figure([evil]).data]
    assert set(NAMES) <= {html.unescape(name) for name in shown}
    chosen = figure([evil, evil], [EVIL, r"reward:part:$\frac$"])
    shown += [trace.name for trace in chosen.data]
    titles = [note.text for note in chosen.layout.annotations]
    assert [html.unescape(title) for title in titles] == [EVIL, r"reward:part:$\frac$"]
    assert not re.search(r"[<>$]", "".join(shown + titles))
    assert chosen.layout.hoverlabel.namelength == -1


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
