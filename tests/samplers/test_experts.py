"""The experts that a mixture chooses: told by the sampler, replayed by the trainer."""

import base64
import re

import numpy as np
import pytest
import torch

import xorl_lab as xl
from tests.closeness import assert_close
from tests.engine.support import exactly
from tests.samplers.support import Counter, engine_of, ids, params, update
from xorl_lab.engine import routing
from xorl_lab.engine.logprobs import run_packed
from xorl_lab.engine.packing import pack
from xorl_lab.errors import ConfigError
from xorl_lab.samplers import embedded, experts

PROMPTS = [list(b"which way"), list(b"which experts"), list(b"?")]
L, K = 4, 2


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> xl.ServiceClient:
    home = tmp_path_factory.mktemp("experts")
    return xl.ServiceClient(home=home, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def mixture(moe) -> xl.SamplingClient:
    return moe.create_sampling_client(base_model="tiny-moe")


def asked(**fields: object) -> xl.SamplingParams:
    return params(return_routed_experts=True, **fields)


def chosen_in_one_pass(client, tokens) -> np.ndarray:
    """(T, L, K) what the model chooses when it reads a sequence whole."""
    model = engine_of(client).base
    found = list(routing.routers(model).values())
    with torch.no_grad(), routing.recorded(found) as seen:
        run_packed(model, pack([tokens])[0])
    return seen.choice()


def datum(prompt, sequence, *, replay: bool) -> xl.Datum:
    """A completion as a recipe sends it."""
    tokens = [*prompt, *sequence.tokens]
    count = len(sequence.tokens)
    inputs = {
        "target_tokens": tokens[1:],
        "weights": [0.0] * (len(prompt) - 1) + [1.0] * count,
    }
    given = sequence.routed_experts if replay else None
    return xl.Datum(xl.ModelInput.from_ints(tokens[:-1]), inputs, given)


def gaps(trainer, drawn, *, replay: bool) -> np.ndarray:
    """Trainer's minus sampler's logprobs of all drawn tokens."""
    data = [datum(p, s, replay=replay) for p, s in drawn]
    outputs = trainer.forward(data).result().loss_fn_outputs
    return np.concatenate(
        [
            np.asarray(out.logprobs.data)[-len(s.tokens) :] - np.asarray(s.logprobs)
            for out, (_, s) in zip(outputs, drawn, strict=True)
        ]
    )


# What the sampler tells.


def test_experts_are_those_of_a_pass_over_the_whole(mixture):
    """Prompts of unequal length side by side, several completions of each."""
    batch = mixture.sample_batch(
        [ids(*p) for p in PROMPTS], asked(max_tokens=9), num_samples=3
    ).result()
    for index, response in batch.completed:
        for sequence in response.sequences:
            whole = [*PROMPTS[index], *sequence.tokens]
            assert sequence.routed_experts.dtype == np.int16
            assert sequence.routed_experts.shape == (len(whole) - 1, L, K)
            expected = chosen_in_one_pass(mixture, whole[:-1])
            assert sequence.routed_experts.tolist() == expected.tolist()


def test_they_come_from_the_very_steps_that_drew_the_tokens(moe, monkeypatch):
    client = moe.create_sampling_client(base_model="tiny-moe")
    counter = Counter(monkeypatch)
    client.sample(ids(*PROMPTS[0]), asked(max_tokens=5), 2).result()
    assert (counter.prefills, counter.steps) == ([len(PROMPTS[0])], [2, 2, 2, 2])


def test_a_completion_of_one_token_has_the_prompts_experts(mixture):
    (sequence,) = mixture.sample(ids(*PROMPTS[1]), asked(max_tokens=1)).result().sequences
    assert sequence.routed_experts.tolist() == chosen_in_one_pass(mixture, PROMPTS[1]).tolist()


def test_only_who_asks_is_told_and_draws_the_same(mixture):
    batch = mixture.sample_batch(
        [ids(*PROMPTS[0]), ids(*PROMPTS[0])], [asked(max_tokens=6), params(max_tokens=6)]
    ).result()
    (_, with_experts), (_, without) = batch.completed
    assert with_experts.sequences[0].routed_experts is not None
    assert without.sequences[0].routed_experts is None
    alone = mixture.sample(ids(*PROMPTS[0]), params(max_tokens=6)).result()
    assert with_experts.tokens == alone.tokens
    assert_close(with_experts.logprobs, alone.logprobs, rtol=0, atol=1e-5)


def test_without_asking_nothing_is_watched(mixture, monkeypatch):
    monkeypatch.setattr(embedded.routing, "recorded", lambda *_: pytest.fail("watched"))
    mixture.sample(ids(*PROMPTS[0]), params(max_tokens=3), 2).result()


def test_what_was_given_up_has_the_experts_of_what_was_read(moe, monkeypatch):
    """At its deadline a request answers with what there is."""
    client = moe.create_sampling_client(base_model="tiny-moe")
    counter = Counter(monkeypatch)
    now = [1000.0]
    monkeypatch.setattr("xorl_lab.samplers.rows.time.monotonic", lambda: now[0])
    monkeypatch.setattr("xorl_lab.samplers.embedded.time.monotonic", lambda: now[0])

    def late(step: int) -> None:
        now[0] += 100.0 if step == 6 else 0.0

    counter.before_step = late
    future = client.sample(ids(*PROMPTS[0]), asked(max_tokens=60), 2, timeout=50.0)
    for sequence in future.result().sequences:
        assert sequence.stop_reason == "abort"
        count = len(PROMPTS[0]) + len(sequence.tokens) - 1
        assert sequence.routed_experts.shape == (count, L, K)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_versions_tell_the_experts_of_their_own_weights(moe, kind):
    if kind == "lora":
        trainer = moe.create_lora_training_client("tiny-moe", rank=4, model_id="told", seed=3)
    else:
        trainer = moe.create_training_client("tiny-moe", model_id="told-full")
    before = trainer.save_weights_and_get_sampling_client()
    update(trainer, steps=3)
    after = trainer.save_weights_and_get_sampling_client()
    prompt = ids(*b"a sentence that is long enough to meet a near-tie somewhere in its layers")
    old, new = (
        c.sample(prompt, asked(max_tokens=1)).result().sequences[0] for c in (before, after)
    )
    assert (old.routed_experts != new.routed_experts).any()
    again = before.sample(prompt, asked(max_tokens=1)).result().sequences[0]
    assert again.routed_experts.tolist() == old.routed_experts.tolist()


def test_a_dense_model_has_nothing_to_tell(base):
    with pytest.raises(
        ConfigError,
        match=exactly(
            "return_routed_experts is set, but of 'tiny' nothing can be returned: this model has "
            "no experts (LlamaForCausalLM is dense); leave it out (in a recipe: replay_experts)"
        ),
    ):
        base.sample(ids(1), asked())
    with pytest.raises(ConfigError, match="nothing can be returned"):
        base.sample_batch([ids(1)], asked())


# What the trainer makes of it.


def drawn_by(client, *, count: int = 4, max_tokens: int = 40):
    prompts = [list(b"experts of "), list(b"a router is "), list(b"0123456789")]
    batch = client.sample_batch(
        [ids(*p) for p in prompts], asked(max_tokens=max_tokens), num_samples=count
    ).result()
    return [(prompts[i], s) for i, response in batch.completed for s in response.sequences]


def test_with_equal_weights_replay_changes_nothing(moe, mixture):
    trainer = moe.create_lora_training_client("tiny-moe", rank=4, model_id="equal", seed=3)
    drawn = drawn_by(mixture)
    free, replayed = (gaps(trainer, drawn, replay=on) for on in (False, True))
    assert_close(replayed, free, rtol=0, atol=1e-6)
    assert np.abs(replayed).max() < 1e-4


def test_replay_closes_the_gap_that_other_experts_open(moe):
    """The sampler's weights are the trainer's rounded to bfloat16; both compute in float32."""
    trainer = moe.create_training_client("tiny-moe", model_id="rounded")
    weights = trainer._session.trained.parameters
    exact = {name: p.detach().clone() for name, p in weights.items()}
    with torch.no_grad():
        for parameter in weights.values():
            parameter.copy_(parameter.to(torch.bfloat16))
    drawn = drawn_by(trainer.save_weights_and_get_sampling_client(), count=6)
    trainer._session.trained.load_weights(exact)
    free, replayed = (np.abs(gaps(trainer, drawn, replay=on)) for on in (False, True))

    own = trainer.save_weights_and_get_sampling_client()
    moved = []
    for prompt, sequence in drawn:
        whole = ids(*prompt, *sequence.tokens[:-1])
        (again,) = own.sample(whole, asked(max_tokens=1)).result().sequences
        differs = np.sort(again.routed_experts, -1) != np.sort(sequence.routed_experts, -1)
        moved.append(differs.any((-1, -2))[-len(sequence.tokens) :])
    changed = np.concatenate(moved)
    assert changed.any(), "without replay no token takes other experts"
    assert changed.mean() < 0.2
    # Where the experts are the same, rounding is all that there is.
    assert free[changed].mean() > 3 * replayed[changed].mean()
    assert replayed.max() < 0.5 * free.max()
    assert replayed.mean() < free.mean()


def test_a_sampler_in_bfloat16_beside_a_trainer_in_float32(moe, tmp_path):
    half = xl.ServiceClient(home=tmp_path, device="cpu", dtype="bfloat16")
    drawn = drawn_by(half.create_sampling_client(base_model="tiny-moe"), count=6)
    trainer = moe.create_lora_training_client("tiny-moe", rank=4, model_id="half", seed=3)
    free, replayed = (np.abs(gaps(trainer, drawn, replay=on)) for on in (False, True))
    assert replayed.mean() < free.mean()
    assert replayed.max() < free.max()


# As bytes.


def known() -> routing.Experts:
    return routing.Experts((1, 3), depth=4, count=8, chosen=2)


def test_sglangs_bytes_hold_every_layer():
    """int32, row-major; what stands for a dense layer is dropped."""
    draw = np.random.default_rng(0)
    whole = draw.random((5, 4, 8)).argsort(-1)[..., :2].astype(np.int32)
    whole[:, [0, 2]] = -7
    meta = {"routed_experts": base64.b64encode(whole.tobytes()).decode()}
    choice = experts.from_meta(meta, 5, known)
    assert choice.dtype == np.int16
    assert choice.tolist() == whole[:, [1, 3]].tolist()


@pytest.mark.parametrize("start", [0, 2, 5])
def test_our_own_bytes_come_back_as_they_were(start):
    choice = np.random.default_rng(0).random((5, 4, 8)).argsort(-1)[..., :2].astype(np.int16)
    meta = experts.to_meta(choice, start)

    def never() -> routing.Experts:
        raise AssertionError("the shape was said")

    assert experts.from_meta(meta, 5 - start, never).tolist() == choice[start:].tolist()


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"routed_experts": "?"}, "routed_experts is not base64"),
        ({"routed_experts": base64.b64encode(b"abc").decode()}, "buffer size"),
        (
            {"routed_experts": base64.b64encode(bytes(4 * 8)).decode()},
            "routed_experts has 8 numbers, but 5 tokens, 4 layers and 2 experts per token make 40",
        ),
        (
            {"routed_experts": base64.b64encode(bytes(4 * 40)).decode()},
            "routed_experts has expert 0 twice at token 0, layer 0",
        ),
        (
            {
                "routed_experts": base64.b64encode(np.full(40, 8, np.int32).tobytes()).decode(),
            },
            "routed_experts has expert 8 at token 0, layer 0",
        ),
        (
            {
                "routed_experts": base64.b64encode(bytes(4 * 40)).decode(),
                "routed_experts_shape": [4, 5, 2],
            },
            "routed_experts has 40 numbers and is said to have shape [4, 5, 2], but 5 tokens were "
            "read",
        ),
        (
            {
                "routed_experts": base64.b64encode(np.full(20, -1, np.int32).tobytes()).decode(),
                "routed_experts_shape": [5, 2, 2],
            },
            "routed_experts has -1 to -1: these are no experts",
        ),
    ],
)
def test_bytes_that_cannot_be_right_are_refused(meta, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        experts.from_meta(meta, 5, known)
