"""What a name of weights refers to."""

import pytest

from tests.lab.support import checkpoint, grpo
from xorl_lab.errors import CheckpointError, ConfigError, StoreError


@pytest.fixture
def weights(lab):
    run = grpo(lab, steps=4, save_every=2)
    run.client.save_state("mine").result()
    run.client.save_weights_for_sampler("mine").result()
    run.client.save_weights_for_sampler("light").result()
    grpo(lab, steps=2)
    lab.load("base").save_state("alone").result()
    return lab._weights


@pytest.mark.parametrize(
    ("reference", "path"),
    [
        ("grpo-1/step-2", "xorl://grpo-1/weights/step-2"),
        ("grpo-1", "xorl://grpo-1/weights/step-4"),
        ("step-4", "xorl://grpo-1/weights/step-4"),
        ("grpo-1/mine", "xorl://grpo-1/weights/mine"),
        ("grpo-1/sampler_weights/mine", "xorl://grpo-1/sampler_weights/mine"),
        ("grpo-1/light", "xorl://grpo-1/sampler_weights/light"),
        ("base-loaded/alone", "xorl://base-loaded/weights/alone"),
    ],
)
def test_references(weights, reference, path):
    assert weights.find(reference).entry.path == path
    assert weights.client(reference).base_model == "tiny"


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("step-2", ConfigError, "runs grpo-2, grpo-1 have a checkpoint 'step-2': name one as RUN/"),
        ("nope", ConfigError, "no run has a checkpoint 'nope'"),
        ("light", ConfigError, "no run has a checkpoint 'light'"),
        ("grpo-1/step-3", CheckpointError, "run 'grpo-1' has no checkpoint 'step-3': did you mean"),
        ("nope/step-2", StoreError, "nope"),
        ("../x", StoreError, r"\.\."),
        (3, ConfigError, "3 names no"),
    ],
)
def test_what_refers_to_nothing_or_to_several(weights, reference, error, message):
    with pytest.raises(error, match=message):
        weights.client(reference)


def test_every_checkpoint_has_a_reference_that_leads_back_to_it(weights):
    found = weights.everything()
    assert len({s.reference for s in found}) == len(found) == 7
    for saved in found:
        assert weights.find(saved.reference).entry == saved.entry
    assert [s.reference for s in found if s.automatic] == [
        "grpo-1/step-2", "grpo-1/step-4", "grpo-2/step-2",
    ]  # fmt: skip


def test_the_latest_that_is_whole(lab):
    reader = grpo(lab, steps=6, save_every=2).reader
    weights = lab._weights
    assert weights.sound(reader) == (weights.last(reader), [])
    (checkpoint(lab, "grpo-1", "step-6") / "adapter_config.json").unlink()
    (checkpoint(lab, "grpo-1", "step-4") / "optimizer.safetensors").write_bytes(b"")
    sound, troubles = weights.sound(reader)
    assert sound.step == 2
    assert [t.split(":")[1].strip() for t in troubles] == [
        "adapter_config.json", "optimizer.safetensors",
    ]  # fmt: skip
    (checkpoint(lab, "grpo-1", "step-2") / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="'step-6' cannot be trusted"):
        weights.sound(reader)


def test_nothing_saved_is_no_error(lab):
    run = grpo(lab, steps=1)
    lab.delete("grpo-1/step-1")
    assert lab._weights.sound(run.reader) == (None, [])
