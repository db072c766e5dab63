"""Weight sync to a real SGLang: five updates agree, a skipped one is caught, a tiny one is told."""

import pytest
import torch

from tests.closeness import assert_close
from tests.sglang import need_sglang
from xorl_lab.client import ServiceClient, outside
from xorl_lab.errors import SamplerError
from xorl_lab.lab import Lab
from xorl_lab.samplers.sglang.controls import SGLang
from xorl_lab.samplers.sync.handover import Handover
from xorl_lab.samplers.sync.sync import SyncError, WeightSync
from xorl_lab.types import AdamParams, Datum, ModelInput, SamplingParams

DATA = [
    Datum(ModelInput.from_ints(list(text)), {"labels": list(text)})
    for text in (b"2 + 2 = 4, and 3 + 3 = 6.", b"Once upon a time there was a robot.")
]


class Trainee:
    """A model that is trained here, and a sync to the real server."""

    def __init__(self, client, sync):
        self.client, self.sync = client, sync
        self.session = client._session

    def step(self, rate=1e-3):
        self.client.forward_backward(DATA).result()
        self.client.optim_step(AdamParams(learning_rate=rate)).result()
        return self.session.snapshot().result()

    def said(self, version):
        return self.sync.trainer.score(version)


@pytest.fixture
def trainee(empty_home, sglang_server, tmp_path):
    """Make a trainee, LoRA or full; the server has its own weights again afterwards."""
    service = ServiceClient(device="cpu", dtype="float32")
    made = []

    def build(full=False, **settings):
        if full:
            client = service.create_training_client("tiny")
        else:
            client = service.create_lora_training_client("tiny", rank=8, seed=1)
        session = client._session
        server = SGLang(sglang_server.url)
        sync = WeightSync(server, Handover(session.engine, session.sampler), tmp_path, **settings)
        made.append(Trainee(client, sync))
        return made[-1]

    yield build
    for each in made:
        each.sync.push(each.sync.trainer.base)
        each.sync.server.name_weights("default")
        each.sync.close()


@pytest.mark.parametrize("full", [False, True])
def test_five_updates_agree(trainee, full):
    it = trainee(full)
    for number in range(1, 6):
        version = it.step()
        report = it.sync.push(version)
        assert report.canary.verdict == "agrees", report.describe()
        assert report.version == number
        assert not report.mixed
        said = it.sync.server.score(it.sync.trainer.text, report.name or None)
        assert_close(said, it.said(version), rtol=0, atol=1e-4)
    assert it.sync.noise < 1e-5


def test_a_sync_that_is_really_skipped_is_caught(trainee, monkeypatch):
    it = trainee(full=True)
    it.sync.push(it.step())
    new = it.step()
    with monkeypatch.context() as patch:
        # The server is told that the weights are new, and gets none.
        patch.setattr(it.sync.trainer, "tensors", lambda _: [("no.such.weight", torch.zeros(1))])
        with pytest.raises(SyncError, match="disagrees"):
            it.sync.push(new)
    assert it.sync.push(new).canary.verdict == "agrees"


def test_an_adapter_of_older_weights_is_caught(trainee, monkeypatch):
    it = trainee()
    old = it.step()
    it.sync.push(old)
    new = it.step()
    write = it.sync.trainer.write_adapter
    with monkeypatch.context() as patch:
        patch.setattr(it.sync.trainer, "write_adapter", lambda _, folder: write(old, folder))
        with pytest.raises(SyncError, match="disagrees"):
            it.sync.push(new)
    assert it.sync.push(new).canary.verdict == "agrees"


def test_a_tiny_update_is_inconclusive(trainee):
    it = trainee()
    assert it.sync.push(it.step()).canary.verdict == "agrees"
    report = it.sync.push(it.step(rate=1e-9))
    assert report.canary.verdict == "inconclusive"
    assert report.trained


def test_an_adapter_can_be_merged_and_the_base_comes_back(trainee):
    it = trainee()
    version = it.step()
    base = it.sync.push(it.sync.trainer.base)
    report = it.sync.publish(version)
    assert (report.name, report.canary.verdict) == ("", "agrees")
    assert_close(it.sync.server.score(it.sync.trainer.text), it.said(version), rtol=0, atol=1e-4)
    onto_base = it.sync.push(version)
    assert onto_base.canary.verdict == "agrees"
    said = it.sync.server.score(it.sync.trainer.text)
    assert_close(said, it.said(it.sync.trainer.base), rtol=0, atol=1e-4)
    assert base.name == ""


def test_full_weights_by_the_disk(trainee):
    it = trainee(full=True, disk=True)
    report = it.sync.push(it.step())
    assert report.canary.verdict == "agrees"


def test_a_name_that_was_unloaded_is_not_served_again(trainee):
    it = trainee()
    report = it.sync.push(it.step())
    it.sync.release(report.name)
    it.sync.tidy()
    with pytest.raises(SamplerError):
        it.sync.server.score(it.sync.trainer.text, report.name)


def test_a_given_name_means_the_newest_weights(trainee):
    it = trainee()
    it.sync.load(it.step(), "step_100")
    new = it.step()
    report = it.sync.load(new, "step_100")
    assert report.canary.verdict == "agrees"
    said = it.sync.server.score(it.sync.trainer.text, "step_100")
    assert_close(said, it.said(new), rtol=0, atol=1e-4)


@pytest.fixture
def lent(sglang_server):
    """The URL of the real server, which has its own weights again afterwards."""
    yield sglang_server.url
    for used in list(outside._known.values()):
        sync, _ = used.awake()
        sync.push(sync.trainer.base)
        sync.server.name_weights("default")
    outside.close_all()


@pytest.mark.parametrize("full", [False, True])
def test_the_client_samples_there_from_one_version(empty_home, lent, full):
    service = ServiceClient(device="cpu", dtype="float32", sampler=lent)
    embedded = ServiceClient(device="cpu", dtype="float32")
    make = "create_training_client" if full else "create_lora_training_client"
    client = getattr(service, make)("tiny")
    greedy = SamplingParams(max_tokens=8, temperature=0)

    def answers(sampler):
        return sampler.sample("Hello", greedy, 2, prompt_logprobs=True, top_logprobs=2).result()

    base = service.create_sampling_client(base_model="tiny")
    first = answers(base)
    assert first.meta_info["weight_version"] == 0
    client.forward_backward(DATA).result()
    client.optim_step(AdamParams(learning_rate=3e-2)).result()
    sampler = client.save_weights_and_get_sampling_client()
    assert sampler.version == 1
    assert sampler.sync.canary.verdict == "agrees"
    assert [r.version for r in client.take_syncs()] == [1]
    got = answers(sampler)
    assert got.meta_info["weight_version"] == 1
    path = client.save_weights_for_sampler("here").result().path
    wanted = answers(embedded.create_sampling_client(model_path=path))
    assert got.tokens == wanted.tokens
    assert_close(got.logprobs, wanted.logprobs, rtol=0, atol=1e-4)
    assert_close(got.prompt_logprobs[1:], wanted.prompt_logprobs[1:], rtol=0, atol=1e-4)
    assert got.sequences[0].stop_reason == wanted.sequences[0].stop_reason
    again = answers(base)
    assert again.tokens == first.tokens
    assert_close(again.logprobs, first.logprobs, rtol=0, atol=1e-5)
    assert_close(answers(sampler).logprobs, got.logprobs, rtol=0, atol=1e-5)
    saved = service.create_sampling_client(model_path=path)
    assert_close(answers(saved).logprobs, got.logprobs, rtol=0, atol=1e-5)
    assert isinstance(client._session.drawing, outside.Outside)


def test_a_lab_trains_here_and_samples_there(empty_home, lent):
    lab = Lab("tiny", rank=8, sampler=lent, device="cpu", dtype="float32")
    first = lab.sample("Hello", max_tokens=4, temperature=0)
    run = lab.grpo(
        ["one", "two"],
        lambda completion: float(sum(c.isalpha() for c in completion)),
        steps=2,
        max_tokens=6,
        learning_rate=3e-2,
        group_size=4,
        prompts_per_step=2,
        save_every=1,
        preflight=False,
        quiet=True,
    )
    syncs = [event for event in run.reader.events() if event.kind == "sync"]
    assert [event.data["version"] for event in syncs] == [0, 1, 2]
    assert [event.data["verdict"] for event in syncs] == ["inconclusive", "agrees", "agrees"]
    assert not [w for w in run.warnings if "canary" in w], "untrained weights are no trouble"
    assert {"sync_gap", "sync_change", "seconds:sync"} <= set(run.metrics.columns)
    # Before an update sampler and trainer agree on what was drawn.
    assert run.metrics["kl_sampler"].abs().max() < 1e-4
    assert set(run.rollouts()["version"]) == {0, 1}
    compared = lab.compare(["base", run.name, f"{run.name}/step-1"], ["Hello"], max_tokens=4)
    assert len(compared.frame().columns) >= 3
    again = lab.sample("Hello", max_tokens=4, temperature=0)
    assert str(again) == str(first)
    drawn = run.resample(int(run.rollouts().index[0]), 1, n=2, max_tokens=3)
    assert len(drawn.texts) == 2
    child = run.branch("step-1", steps=2, quiet=True)
    assert child.status.step == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_amid_a_sync_is_started_again(empty_home, monkeypatch):
    need_sglang()
    client = ServiceClient(device="cpu", dtype="float32", sampler="sglang").create_training_client(
        "tiny"
    )
    drawing = client._session.drawing
    client.forward_backward(DATA).result()
    client.optim_step(AdamParams(learning_rate=1e-2)).result()
    sync, _ = drawing.awake()
    process = drawing._process
    tensors = sync.trainer.tensors

    def deadly(version):
        for number, named in enumerate(tensors(version)):
            if number == 3:
                for each in process.processes():
                    each.kill()
                process._process.wait(20)
            yield named

    with monkeypatch.context() as patch:
        patch.setattr(sync.trainer, "tensors", deadly)
        with pytest.raises(SamplerError, match="answers nobody until they are sent again"):
            client.save_weights_and_get_sampling_client()
    sampler = client.save_weights_and_get_sampling_client()
    assert drawing._process is not process
    assert sampler.sync.canary.verdict == "agrees"
    answer = sampler.sample("Hello", SamplingParams(max_tokens=4)).result()
    assert answer.meta_info["weight_version"] == 1
    outside.close_all()
    assert not drawing._process
