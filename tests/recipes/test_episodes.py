"""Episodes of several turns: what is sampled is what is trained, token for token."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recipes.fakes import EOS, FakeClient, byte_tokenizer_once, sequence
from xorl_lab.errors import ConfigError, DataError
from xorl_lab.futures import APIFuture
from xorl_lab.recipes import rollouts
from xorl_lab.recipes.environments import judge_of
from xorl_lab.recipes.episodes import collect
from xorl_lab.recipes.grpo import GrpoSettings, grpo
from xorl_lab.recipes.prompts import encode_prompts
from xorl_lab.types import BatchSampleResult, SampledSequence, SampleResponse, SamplingParams

CHAT = [{"role": "user", "content": "go"}]


@dataclass
class Scripted:
    """A client and sampler that draws what is written down, and notes what it was asked."""

    turns: list
    """Per sample its turns."""
    context_length: int = 4096
    version: int = 3
    asked: list = field(default_factory=list)
    """Per call a list of (prompt ids, params, number of samples)."""

    def __post_init__(self):
        self._at = [0] * len(self.turns)

    def get_tokenizer(self):
        return byte_tokenizer_once()

    def sample_batch(self, prompts, params, num_samples=1, top_logprobs=0, entropies=False):
        ids = [p.to_ints() for p in prompts]
        self.asked.append(list(zip(ids, params, [num_samples] * len(ids), strict=True)))
        live = [i for i, script in enumerate(self.turns) if self._at[i] < len(script)]
        drawn = []
        for i in live:
            drawn.append(self.turns[i][self._at[i]])
            self._at[i] += 1
        found = BatchSampleResult([], [], [])
        for index in range(len(ids)):
            some, drawn = drawn[:num_samples], drawn[num_samples:]
            found.completed.append((index, SampleResponse(some)))
        return APIFuture.completed(found)


def episodes(client, prompt, environment, *, max_tokens=8, max_turns=8, seconds=None, seed=5):
    encoded = encode_prompts([prompt], client.get_tokenizer())
    draw = rollouts.Draw(client, client, len(client.turns), 2, max_turns)
    params = [SamplingParams(max_tokens=max_tokens, seed=seed)]
    judge = judge_of(environment, set(), seconds)
    (found,) = collect(draw, encoded, params, judge)
    return encoded[0], found


def drawn(tokens, *, ended):
    """A turn of any tokens, each with values of its own."""
    ids = [*tokens, *([EOS] if ended else [])] or [0]
    logprobs = [-0.25 * (i + 1) for i in range(len(ids))]
    top = [[(t, -0.1), ((t + 1) % 256, -2.0)] for t in ids]
    text = byte_tokenizer_once().decode(list(tokens))
    reason = "stop" if ended else "length"
    return SampledSequence(ids, reason, logprobs, text, top, [0.5] * len(ids))


TOKENS = st.lists(st.integers(0, 255), max_size=6)
# The names of special tokens are those tokens, and no bytes.
SAID = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda text: "<|" not in text
)
EPISODE = st.lists(st.tuples(TOKENS, st.booleans(), SAID), min_size=1, max_size=4)


@given(script=st.lists(EPISODE, min_size=1, max_size=3), chat=st.booleans())
def test_each_turn_is_drawn_behind_exactly_what_is_trained_on(script, chat):
    turns = [[drawn(t, ended=ended) for t, ended, _ in episode] for episode in script]
    client = Scripted(turns)
    heard = []

    def environment():
        mine = len(heard)
        heard.append([])
        for _, _, said in script[mine]:
            turn = yield said if heard[mine] else None
            heard[mine].append(turn)
        return 1.0

    # Written otherwise than the code under test: what was said behind each turn but the last.
    prompt, found = episodes(client, CHAT if chat else "go", environment)
    assert [[t.tokens for t in mine] for mine in heard] == [[s.tokens for s in e] for e in turns]
    prompts = {}
    for number, call in enumerate(client.asked, start=1):
        for ids, params, count in call:
            assert count == (len(turns) if number == 1 else 1)
            prompts.setdefault(number, []).append((ids, params.seed))
    for index, (rollout, mine) in enumerate(zip(found, turns, strict=True)):
        assert rollout.error is None
        tokens, weights, logprobs = [], [], []
        for number, turn in enumerate(mine, start=1):
            alive = [i for i, other in enumerate(turns) if len(other) >= number]
            place = 0 if number == 1 else alive.index(index)
            assert prompts[number][place][0] == [*prompt.tokens, *tokens]
            tokens += turn.tokens
            weights += [1.0] * len(turn.tokens)
            logprobs += turn.logprobs
            if number < len(mine):
                said = script[index][number][2]
                between = _between(turn, said) if chat else said.encode()
                tokens += list(between)
                weights += [0.0] * len(between)
                logprobs += [0.0] * len(between)
        assert rollout.tokens == tokens
        assert (rollout.weights or [1.0] * len(tokens)) == weights
        assert (rollout.weights is None) == (len(mine) == 1)
        assert rollout.version == 3
        _check_values(rollout, weights)
        _check_datum(prompt, rollout, tokens, weights, logprobs)


def _between(turn, said):
    ended = [] if turn.tokens[-1] == EOS else [EOS]
    return [*ended, 256, *b"user\n", *said.encode(), EOS, 256, *b"assistant\n"]


def _check_values(rollout, weights):
    for name, values in {"logprobs": rollout.logprobs, **rollout.streams}.items():
        assert [math.isnan(v) for v in values] == [w == 0 for w in weights], name
    top = rollout.top_logprobs
    assert top.ids.shape == (len(weights), 2)
    assert ((top.ids == -1).all(1) == [w == 0 for w in weights]).all()


def _check_datum(prompt, rollout, tokens, weights, logprobs):
    before = [0.0] * (len(prompt.tokens) - 1)
    datum = rollouts.datum(rollouts.Sample(prompt.tokens, rollout), {"extra": rollout.logprobs})
    every = [*prompt.tokens, *tokens]
    inputs = {name: values.tolist() for name, values in datum.loss_fn_inputs.items()}
    assert datum.model_input.to_ints() == every[:-1]
    assert inputs.pop("target_tokens") == every[1:]
    assert inputs.pop("weights") == before + weights
    assert inputs.pop("advantages") == [0.0] * len(every[1:])
    assert inputs.pop("logprobs") == pytest.approx(before + logprobs)
    assert inputs.pop("extra") == pytest.approx(before + logprobs)
    assert not inputs


def go_on():
    while True:
        yield
        yield "more"


def told(texts, **more):
    return Scripted([[sequence(text, **more) for text in texts]])


def test_the_text_is_all_that_was_said():
    def environment():
        turn = yield
        turn = yield f"{turn.text}?"
        return float(turn.text == "b")

    _, (text,) = episodes(told("ab"), "go", environment)
    assert (text.text, text.reward) == ("aa?b", 1.0)
    _, (chat,) = episodes(told("ab"), CHAT, environment)
    assert chat.text == "a<|eos|><|bos|>user\na?<|eos|><|bos|>assistant\nb"
    assert byte_tokenizer_once().decode(chat.tokens) == f"{chat.text}<|eos|>"


def test_an_environment_that_never_ends_is_overlong():
    _, (rollout,) = episodes(told("abc"), "go", endless, max_turns=3)
    assert rollout.reward is None
    assert rollout.error.startswith("it was still going on after max_turns=3 turns: raise max_turn")
    assert rollout.stop_reason == "length"
    assert rollout.turns == [(0, 2), (6, 8), (12, 14)]


def endless():
    yield
    while True:
        yield "more"


def test_the_last_turn_is_announced():
    def environment():
        numbers = []
        turn = yield
        while not turn.last:
            numbers.append(turn.number)
            turn = yield "more"
        return float(numbers == [1, 2] and turn.number == 3)

    _, (rollout,) = episodes(told("abc"), "go", environment, max_turns=3)
    assert rollout.reward == 1.0


def test_an_episode_that_fills_the_context_is_overlong():
    client = told("abcdef")
    client.context_length = 20
    _, (rollout,) = episodes(client, "go", endless, max_tokens=8)
    # go a. more b. then 14 tokens, and 8 more do not fit
    assert rollout.error.startswith("there was no room for turn 3: 14 tokens with max_tokens=8 are")
    assert rollout.stop_reason == "length"
    assert len(client.asked) == 2


def test_a_failure_is_of_one_episode_alone():
    client = Scripted([[sequence("a"), sequence("b")], [sequence("x")], [sequence("c")] * 2])

    def environment():
        turn = yield
        if turn.text == "x":
            raise ValueError("no x")
        turn = yield "more"
        return float(turn.text == "b")

    _, found = episodes(client, "go", environment)
    assert [r.reward for r in found] == [1.0, None, 0.0]
    assert found[1].error.startswith("ValueError: no x (line ")
    assert len(client.asked[1]) == 2


@pytest.mark.parametrize("said", [3, "", None])
def test_what_cannot_be_read_fails_the_episode(said):
    def environment():
        yield
        yield said
        return 1.0

    _, (rollout,) = episodes(told("ab"), "go", environment)
    assert rollout.reward is None
    assert "the environment yielded" in rollout.error


def test_a_turn_that_was_aborted_fails_the_episode():
    client = Scripted([[sequence("a"), sequence("b", "abort")]])
    _, (rollout,) = episodes(client, "go", endless)
    assert (rollout.error, rollout.stop_reason) == (
        "the completion was aborted before it ended",
        "abort",
    )


def test_a_hung_environment_is_cut_off():
    def environment():
        yield
        while True:
            pass

    _, (rollout,) = episodes(told("a"), "go", environment, seconds=0.1)
    assert rollout.error.startswith("it took longer than reward_timeout=0.1 s")


def test_seeds_differ_by_sample_and_turn_and_are_the_same_again():
    def seeds(seed):
        client = Scripted([[sequence("a")] * 3, [sequence("a")] * 3])
        episodes(client, "go", endless, max_turns=3, seed=seed)
        return [[params.seed for _, params, _ in call] for call in client.asked]

    first = seeds(5)
    assert seeds(5) == first
    later = first[1] + first[2]
    assert first[0] == [5]
    assert len(set(later)) == 4
    assert not set(later) & {s for call in seeds(6)[1:] for s in call}
    assert seeds(None) == [[None], [None, None], [None, None]]


def test_what_a_sampler_does_not_report_is_left_out():
    silent = SampledSequence([97, EOS], "stop", None, "a")
    _, (rollout,) = episodes(Scripted([[silent, sequence("b")]]), "go", two)
    assert rollout.logprobs == []
    assert rollout.streams == {}
    assert rollout.top_logprobs is None


def two():
    yield
    turn = yield "more"
    return float(len(turn.tokens))


# In the recipe.


SETTINGS = {"steps": 1, "max_tokens": 4, "learning_rate": 1e-3, "prompts_per_step": 1}


def by_index(text, params, index):
    return sequence("abcdefgh"[index])


def test_one_turn_is_what_a_reward_function_would_have_been():
    def reward(completion):
        return ord(completion)

    def environment():
        turn = yield
        return ord(turn.text)

    one, other = (
        list(grpo(FakeClient(by_index), ["1", "2"], judge, **{**SETTINGS, "steps": 3}))
        for judge in (reward, environment)
    )
    assert [r.groups for r in one] == [r.groups for r in other]
    kept = [{k: v for k, v in r.metrics.items() if "second" not in k} for r in one]
    assert kept == [{k: v for k, v in r.metrics.items() if "second" not in k} for r in other]


def test_failed_and_overlong_episodes_leave_the_group_and_the_loss():
    def environment():
        turn = yield
        if turn.text == "a":
            raise ValueError("no")
        if turn.text == "b":
            while True:
                yield "more"
        return float(ord(turn.text))

    client = FakeClient(by_index)
    (record,) = grpo(client, ["1"], environment, max_turns=2, group_size=4, **SETTINGS)
    (group,) = record.groups
    assert [r.error is None for r in group.rollouts] == [False, False, True, True]
    assert [r.advantage for r in group.rollouts] == [0, 0, -1, 1]
    assert record.metrics["rewards_failed"] == 2
    assert record.metrics["turns"] == 1.25
    (call,) = client.named("forward_backward")
    assert len(call.data) == 2


def test_a_step_in_which_all_failed_is_an_error():
    with pytest.raises(DataError, match=r"failed for all 2 completions .* after max_turns=1 turns"):
        list(grpo(FakeClient(by_index), ["1"], endless, max_turns=1, group_size=2, **SETTINGS))


def test_held_out_episodes_are_played_too():
    (record,) = grpo(
        FakeClient(by_index), ["1"], two, held_out=["2", "3"], group_size=2, **SETTINGS
    )
    assert record.metrics["held_out:reward"] == 2.0


@pytest.mark.parametrize(
    ("name", "bad"),
    [("max_turns", 0), ("max_turns", 1.5), ("reward_timeout", 0), ("reward_timeout", "1"),
     ("reward_timeout", float("inf"))],
)  # fmt: skip
def test_its_settings_are_checked(name, bad):
    with pytest.raises(ConfigError, match=f"{name} is {bad!r}"):
        GrpoSettings(steps=1, max_tokens=1, learning_rate=1e-3, **{name: bad})
