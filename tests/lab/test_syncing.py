"""What a run records of weights that were sent to a sampler elsewhere."""

from collections import namedtuple

import pytest

from xorl_lab.lab.syncing import note_syncs, warnings
from xorl_lab.recipes.syncing import sync_metrics
from xorl_lab.samplers.sync.canary import Canary
from xorl_lab.samplers.sync.report import SyncReport

Event = namedtuple("Event", "kind text step data")


def report(verdict="agrees", change=0.5, version=3, **more):
    canary = Canary(verdict, 0.001, change, 1e-5)
    return SyncReport("m", version, "m-v3-x", 0.5, 100, canary, url="http://s", **more)


class Writer:
    def __init__(self):
        self.events = []

    def event(self, kind, text, *, step=None, data=None):
        self.events.append(Event(kind, text, step, data))


class Client:
    def __init__(self, *reports):
        self.reports = list(reports)

    def take_syncs(self):
        taken, self.reports = self.reports, []
        return taken


def test_each_sync_is_an_event_of_its_step_with_its_figures():
    writer, client = Writer(), Client(report(), report(version=4))
    note_syncs(writer, client, 7)
    assert [(e.kind, e.step, e.data["version"]) for e in writer.events] == [
        ("sync", 7, 3),
        ("sync", 7, 4),
    ]
    assert writer.events[0].data["gap"] == 0.001
    assert "canary agrees" in writer.events[0].text
    note_syncs(writer, client, 8)
    assert len(writer.events) == 2


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (report("inconclusive", change=1e-6), "inconclusive"),
        (report("disagrees"), "other weights than it was sent"),
        (report(mixed=True), "mix versions"),
    ],
)
def test_what_speaks_against_it_is_a_warning(given, word):
    writer = Writer()
    note_syncs(writer, Client(given), 1)
    (warning,) = [e for e in writer.events if e.kind == "warning"]
    assert word in warning.text
    # The same sentence each time, whatever the figures: it is shown once.
    assert warnings(given) == [warning.text]


@pytest.mark.parametrize(
    "given",
    [
        report(),
        report("inconclusive", change=0.0),
        report("inconclusive", change=1e-6, version=0),
    ],
)
def test_untrained_or_unchanged_weights_are_no_trouble(given):
    assert warnings(given) == []


def test_the_figures_are_metrics_where_weights_were_sent():
    sampler = namedtuple("Sampler", "sync")
    assert sync_metrics(sampler(None)) == {}
    metrics = sync_metrics(sampler(report()))
    assert metrics == {
        "sync_gap": 0.001,
        "sync_change": 0.5,
        "sync_noise": 1e-5,
        "sync_bytes": 100,
    }
