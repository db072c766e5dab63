"""Weight sync against a fake server: what is sent, in which order, and what is caught."""

import threading

import pytest

from tests.closeness import assert_close
from tests.samplers.fake_sglang import FakeServer, FakeTrainer, version
from xorl_lab.errors import ConfigError, SamplerError
from xorl_lab.samplers.sync.sync import SyncError, WeightSync


@pytest.fixture
def make(tmp_path):
    def build(server=None, **settings):
        return WeightSync(server or FakeServer(), FakeTrainer(), tmp_path / "folder", **settings)

    return build


def folders(tmp_path):
    return sorted(p.name for p in (tmp_path / "folder").glob("*"))


class TestAdapters:
    def test_an_adapter_gets_a_name_of_its_own_and_is_proved(self, make):
        sync = make()
        report = sync.push(version(1))
        assert report.name.startswith("m-v1-")
        assert report.canary.verdict == "agrees"
        assert_close(report.canary.change, 0.5, rtol=1e-6)
        assert (report.model_id, report.version, report.bytes, report.mixed) == ("m", 1, 16, False)
        assert report.trained
        assert sync.server.adapters[report.name] == [-1.5] * 4

    def test_generation_goes_on_meanwhile(self, make):
        sync = make()
        sync.push(version(1))
        assert "pause" not in sync.server.names
        assert "update_from_tensors" not in sync.server.names

    def test_no_name_is_used_twice(self, make):
        sync = make()
        names = set()
        for _ in range(3):
            for number in (1, 2):
                report = sync.push(version(number))
                names.add(report.name)
                sync.release(report.name)
        assert len(names) == 6

    def test_the_same_weights_are_not_sent_again(self, make):
        sync, weights = make(), version(1)
        first, second = sync.push(weights), sync.push(weights)
        assert first.name == second.name
        assert second.bytes == 0
        sync.release(first.name)
        sync.tidy()
        assert first.name in sync.server.adapters
        sync.release(first.name)
        sync.tidy()
        assert first.name not in sync.server.adapters

    def test_what_nobody_wants_is_unloaded_with_its_folder_before_the_next_push(
        self, make, tmp_path
    ):
        sync = make()
        old = sync.push(version(1))
        sync.release(old.name)
        assert old.name in sync.server.adapters
        new = sync.push(version(2))
        assert list(sync.server.adapters) == [new.name]
        assert [f.startswith(new.name) for f in folders(tmp_path)] == [True]

    def test_the_change_is_that_since_the_last_push_of_the_model(self, make):
        sync = make()
        sync.push(version(3))
        assert_close(sync.push(version(4)).canary.change, 0.5, rtol=1e-6)
        assert_close(sync.push(version(4, model_id="n")).canary.change, 2.0, rtol=1e-6)

    def test_a_tiny_update_is_inconclusive(self, make):
        sync = make(FakeServer(noise=1e-4))
        first = sync.push(version(1, -1.5, -1.5, -1.5, -1.5))
        assert first.canary.verdict == "agrees"
        tiny = sync.push(version(2, -1.5002, -1.5, -1.5, -1.5))
        assert tiny.canary.verdict == "inconclusive"
        assert_close(tiny.canary.noise, 1e-4, rtol=1e-3)

    def test_untrained_weights_are_inconclusive_and_say_that_they_are_none(self, make):
        report = make().push(version(0, -1.0, -1.0, -1.0, -1.0))
        assert report.canary.verdict == "inconclusive"
        assert not report.trained

    def test_a_skipped_sync_is_an_error_and_nothing_is_left(self, make, tmp_path):
        sync = make()
        sync.server.skipped.add("load_adapter")
        with pytest.raises(SyncError, match=r"disagrees .*answers with other weights"):
            sync.push(version(1))
        assert sync.server.adapters == {}
        assert folders(tmp_path) == []
        sync.server.skipped.clear()
        assert sync.push(version(1)).canary.verdict == "agrees"

    def test_it_is_only_reported_where_that_is_asked_for(self, make):
        sync = make(strict=False)
        sync.server.skipped.add("load_adapter")
        assert sync.push(version(1)).canary.verdict == "disagrees"

    @pytest.mark.parametrize("call", ["load_adapter", "score"])
    def test_a_failing_load_leaves_nothing_and_the_next_works(self, make, tmp_path, call):
        sync = make()
        sync.push(version(1))
        before = folders(tmp_path)
        sync.server.broken[call] = 1
        with pytest.raises(SamplerError, match="failed"):
            sync.push(version(2))
        assert folders(tmp_path) == before
        assert len(sync.server.adapters) == 1
        report = sync.push(version(2))
        assert report.canary.verdict == "agrees"
        assert_close(report.canary.change, 0.5, rtol=1e-6)

    def test_a_rank_that_is_too_large_is_refused(self, make):
        with pytest.raises(ConfigError, match="rank 0"):
            make(FakeServer(max_rank=0)).push(version(1))

    def test_a_given_name_is_taken_from_the_older_weights(self, make):
        sync = make()
        sync.load(version(1), "step_100")
        report = sync.load(version(2), "step_100")
        assert report.name == "step_100"
        assert sync.server.adapters == {"step_100": [-2.0] * 4}
        calls = [call for call in sync.server.names if call.endswith("load_adapter")]
        assert calls == ["load_adapter", "unload_adapter", "load_adapter"]


class TestFullWeights:
    def test_the_server_is_at_rest_while_they_are_replaced(self, make):
        sync = make()
        report = sync.push(version(1, kind="full"))
        assert (report.name, report.canary.verdict, report.mixed) == ("", "agrees", False)
        names = sync.server.names
        order = ["pause", "flush_cache", "update_from_tensors", "resume", "score"]
        assert names[names.index("pause") :] == order
        assert sync.server.weights == [-1.5] * 4
        assert report.bytes == 16

    def test_they_can_go_by_the_disk(self, make, tmp_path):
        sync = make(disk=True)
        assert sync.push(version(1, kind="full")).canary.verdict == "agrees"
        assert "update_from_disk" in sync.server.names
        assert folders(tmp_path) == []

    def test_requests_under_way_are_waited_for(self, make):
        sync = make()
        sync.server.busy = 2
        report = sync.push(version(1, kind="full"))
        assert not report.mixed
        calls = [c for c in sync.server.calls if c[0] in ("pause", "resume", "update_from_tensors")]
        assert [c[0] for c in calls] == [*["pause", "resume"] * 2, "pause", "update_from_tensors",
                                         "resume"]  # fmt: skip
        assert {c[1] for c in calls if c[0] == "pause"} == {"in_place"}

    def test_where_they_do_not_end_it_is_recorded_that_they_mix(self, make):
        sync = make(patience=0.01)
        sync.server.busy = 10**9
        report = sync.push(version(1, kind="full"))
        assert report.mixed
        assert "mix versions" in report.describe()
        assert ("pause", "retract") in sync.server.calls
        assert sync.server.weights == [-1.5] * 4

    def test_requests_of_ones_own_that_were_not_sent_yet_are_waited_for(self, make):
        sync = make()
        sync.traffic.begin(1)
        done = []
        push = threading.Thread(target=lambda: done.append(sync.push(version(1, kind="full"))))
        push.start()
        push.join(0.2)
        assert not done
        assert "pause" not in sync.server.names
        sync.traffic.end()
        push.join(20)
        assert not done[0].mixed

    def test_a_skipped_sync_is_an_error_and_nobody_samples_from_it(self, make):
        sync, weights = make(), version(1, kind="full")
        sync.server.skipped.add("update_from_tensors")
        with pytest.raises(SyncError, match="disagrees"):
            sync.push(weights)
        assert not sync.serves("", weights)
        sync.server.skipped.clear()
        assert sync.push(weights).canary.verdict == "agrees"
        assert sync.serves("", weights)

    def test_an_update_that_breaks_off_leaves_the_server_held_and_the_next_push_works(self, make):
        sync, weights = make(), version(1, kind="full")
        sync.server.partly = 2
        with pytest.raises(SamplerError, match=r"neither old nor new.*answers nobody"):
            sync.push(weights)
        assert sync.server.paused
        assert not sync.serves("", weights)
        assert not sync.serves("", sync.trainer.base)
        report = sync.push(weights)
        assert report.canary.verdict == "agrees"
        assert not sync.server.paused

    def test_the_same_weights_are_proved_again_but_not_sent(self, make):
        sync, weights = make(), version(1, kind="full")
        sync.push(weights)
        report = sync.push(weights)
        assert (report.bytes, report.canary.verdict) == (0, "agrees")
        assert sync.server.names.count("update_from_tensors") == 1

    def test_five_updates_agree(self, make):
        sync = make(FakeServer(noise=1e-5))
        verdicts = [sync.push(version(n, kind="full")).canary.verdict for n in range(1, 6)]
        assert verdicts == ["agrees"] * 5


class TestBothWays:
    def test_a_merged_adapter_is_answered_with_when_none_is_named(self, make):
        sync, weights = make(), version(2)
        loaded = sync.push(version(1))
        report = sync.publish(weights)
        assert (report.name, report.canary.verdict) == ("", "agrees")
        assert sync.server.weights == [-2.0] * 4
        assert loaded.name not in sync.server.adapters, "it would be wrong on other weights"

    def test_an_adapter_comes_back_on_the_base_weights(self, make):
        sync = make()
        sync.publish(version(2))
        report = sync.push(version(3))
        assert sync.server.weights == [-1.0] * 4
        assert sync.serves("", sync.trainer.base)
        assert report.canary.verdict == "agrees"

    def test_the_base_model_can_be_asked_for_again(self, make):
        sync = make()
        sync.push(version(1, kind="full"))
        report = sync.push(sync.trainer.base)
        assert (report.name, report.model_id, report.canary.verdict) == ("", "", "agrees")
        assert sync.server.weights == [-1.0] * 4


class TestTheServer:
    def test_noise_is_measured_on_the_base_weights(self, make):
        sync = make(FakeServer(noise=3e-4))
        assert sync.noise is None
        sync.push(version(1))
        assert_close(sync.noise, 3e-4, rtol=1e-3)

    def test_weights_that_somebody_sent_are_replaced_by_the_base_first(self, make):
        sync = make(FakeServer(weights=[-7.0] * 4, named="step-3"))
        assert sync.push(version(1)).canary.verdict == "agrees"
        assert sync.server.weights == [-1.0] * 4
        assert sync.noise < 1e-5

    def test_so_are_those_that_it_was_started_with_if_they_are_others(self, make):
        sync = make(FakeServer(weights=[-7.0] * 4))
        sync.push(version(1))
        assert sync.server.weights == [-1.0] * 4

    def test_a_model_that_computes_something_else_is_refused(self, make):
        with pytest.raises(ConfigError, match=r"not the model that is trained.*nats a token"):
            make(FakeServer(noise=0.1)).push(version(1))

    def test_rougher_arithmetic_is_given_more_room(self, make):
        sync = make(FakeServer(noise=0.05, dtype="bfloat16"))
        assert sync.push(version(1)).canary.verdict == "agrees"
        assert sync.push(version(1, -1.45, -1.55, -1.45, -1.55)).canary.verdict == "inconclusive"

    def test_one_that_was_started_again_is_noticed(self, make, tmp_path):
        sync, weights = make(), version(1)
        old = sync.push(weights)
        sync.server = FakeServer()
        new = sync.push(weights)
        assert new.name != old.name
        assert sync.server.adapters == {new.name: [-1.5] * 4}
        assert [f.startswith(new.name) for f in folders(tmp_path)] == [True]

    def test_weights_that_somebody_sent_meanwhile_are_noticed(self, make):
        sync = make()
        sync.push(version(1))
        sync.server.weights, sync.server.named = [-9.0] * 4, "mine"
        assert sync.push(version(2)).canary.verdict == "agrees"
        assert sync.server.weights == [-1.0] * 4

    def test_one_that_was_left_paused_is_woken(self, make):
        sync = make()
        sync.server.broken["require"] = 1
        sync.server.paused = "in_place"
        assert sync.push(version(1)).canary.verdict == "agrees"

    def test_one_that_is_gone_is_told_of(self, make):
        sync = make()
        sync.server.broken |= {"require": 9, "resume": 9}
        with pytest.raises(SamplerError, match="require failed"):
            sync.push(version(1))


def test_a_report_is_json_and_a_sentence(make):
    report = make().push(version(1))
    data = report.data()
    assert data["verdict"] == "agrees"
    assert data["name"] == report.name
    assert "version 1 of 'm'" in report.describe()
