"""Drawing is exact: from logits and a uniform number to a token, and its logprob."""

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.closeness import assert_close
from xorl_lab.errors import SamplerError
from xorl_lab.samplers.drawing import Drawn, draw, stream, uniforms
from xorl_lab.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = SamplingParams()
LAST = 1 - 2.0**-53
"""The largest number that a uniform draw can give."""


def one(logits: torch.Tensor, number: float, params: SamplingParams = PLAIN, top: int = 0) -> Drawn:
    """Draw one token from (V,) logits."""
    return draw(logits[None], [params], np.array([number]), top)


def many(logits: torch.Tensor, count: int, params: SamplingParams = PLAIN) -> np.ndarray:
    """Draw ``count`` tokens from (V,) logits with the numbers of one stream."""
    numbers = uniforms([stream(5, [1, 2], 0)] * count, range(count))
    return draw(logits.expand(count, -1), [params] * count, numbers).tokens.numpy()


def kept_by_loop(probabilities: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The tokens that top_k and then top_p leave, by the definition, one token at a time."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    if top_k > 0:
        order = order[:top_k]
    total = sum(probabilities[i] for i in order)
    kept: set[int] = set()
    mass = 0.0
    for token in order:
        if kept and mass >= top_p * total:
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


def inverted(masses: np.ndarray, number: float) -> int:
    """The plain inversion: the first token at which the running sum exceeds number * total."""
    running = np.cumsum(masses.astype(np.float64))
    return int(np.searchsorted(running, number * running[-1], side="right"))


def random_logits(size: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def chi_square_limit(freedom: int) -> float:
    """What a chi-square variable exceeds once in 10,000 (Wilson & Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("size", [2, 5, 127, 128, 129, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_frequencies_are_those_of_softmax(size, temperature):
    count = 40_000
    logits = random_logits(size, size, spread=1.0)
    drawn = many(logits, count, SamplingParams(temperature=temperature))
    expected = torch.softmax(logits.double() / temperature, 0).numpy() * count
    rare = expected < 5
    seen = np.bincount(drawn, minlength=size).astype(float)
    # What is expected fewer than five times is counted together, as the test wants it.
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert statistic < chi_square_limit(len(seen) - 1)


def test_the_chi_square_test_notices_a_wrong_temperature():
    count = 40_000
    logits = random_logits(50, 1, spread=1.0)
    seen = np.bincount(many(logits, count, SamplingParams(temperature=1.1)), minlength=50)
    expected = torch.softmax(logits.double(), 0).numpy() * count
    assert ((seen - expected) ** 2 / expected).sum() > chi_square_limit(49)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 256, 259, 1000])
@pytest.mark.parametrize("kind", ["plain", "huge", "holes", "one", "tail"])
def test_two_levels_give_what_one_running_sum_gives(size, kind):
    shapes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": lambda x: x,
        "huge": lambda x: x * 1e4,
        "holes": lambda x: torch.where(x < 0, -torch.inf, x),
        "one": lambda x: torch.where(x == x.max(), x, -torch.inf),
        "tail": lambda x: torch.where(torch.arange(size) < size // 2, -60.0, x),
    }
    logits = shapes[kind](random_logits(size, 3).abs() - 1.0)
    if not bool(torch.isfinite(logits).any()):
        logits[-1] = 0.0
    numbers = np.concatenate([[0.0, LAST, 0.5], uniforms([7] * 300, range(300))])
    got = draw(logits.expand(len(numbers), -1), [PLAIN] * len(numbers), numbers).tokens.numpy()
    masses = (logits - logits.max()).exp().numpy()
    running = np.cumsum(masses.astype(np.float64))
    for number, token in zip(numbers, got, strict=True):
        if token != inverted(masses, number):
            # The sums are added in another order; only a number on the very edge may differ.
            edge = min(abs(running - number * running[-1]))
            assert edge < 1e-12 * running[-1], (number, token)
        assert masses[token] > 0


@given(
    logits=st.lists(
        st.one_of(
            st.floats(-200, 200, width=32),
            st.just(-float("inf")),
            st.floats(-(2.0**100), 2.0**100, width=32),
        ),
        min_size=1,
        max_size=300,
    ),
    number=st.one_of(st.sampled_from([0.0, LAST, 2.0**-53]), st.floats(0, LAST)),
    temperature=st.sampled_from([1.0, 0.7, 1e-3, 1e-30, 1e-300, 100.0]),
    top_k=st.sampled_from([-1, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-9, 1 - 1e-12]),
)
def test_a_token_without_probability_is_never_drawn(logits, number, temperature, top_k, top_p):
    values = torch.tensor(logits, dtype=torch.float32)
    if not bool(torch.isfinite(values).any()):
        values[0] = 0.0
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = one(values, number, params)
    token = int(drawn.tokens)
    assert 0 <= token < len(values)
    assert torch.isfinite(values[token])
    assert np.isfinite(float(drawn.logprobs))
    assert float(drawn.logprobs) <= 1e-6


@given(
    number=st.one_of(st.sampled_from([0.0, LAST]), st.floats(0, LAST)),
    seed=st.integers(0, 50),
    top_k=st.sampled_from([-1, 1, 3, 40, 259]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 1e-6]),
    size=st.sampled_from([3, 128, 259]),
)
def test_only_what_top_k_and_top_p_leave_is_drawn(number, seed, top_k, top_p, size):
    logits = random_logits(size, seed)
    drawn = one(logits, number, SamplingParams(top_k=top_k, top_p=top_p))
    probabilities = torch.softmax(logits.double(), 0).numpy()
    assert int(drawn.tokens) in kept_by_loop(probabilities, top_k, top_p)


@pytest.mark.parametrize(("top_k", "top_p"), [(4, 1.0), (-1, 0.7), (10, 0.6), (1, 0.01)])
def test_all_that_top_k_and_top_p_leave_is_drawn_in_proportion(top_k, top_p):
    count = 5_000
    logits = random_logits(150, 11)
    probabilities = torch.softmax(logits.double(), 0).numpy()
    kept = sorted(kept_by_loop(probabilities, top_k, top_p))
    drawn = many(logits, count, SamplingParams(top_k=top_k, top_p=top_p))
    seen = np.bincount(drawn, minlength=150)
    assert seen[kept].sum() == count
    share = probabilities[kept] / probabilities[kept].sum()
    if len(kept) > 1:
        statistic = ((seen[kept] - share * count) ** 2 / (share * count)).sum()
        assert statistic < chi_square_limit(len(kept) - 1)


def test_top_p_keeps_the_token_that_reaches_the_share():
    logits = torch.tensor([0.5, 0.3, 0.2]).double().log().float()
    drawn = many(logits, 500, SamplingParams(top_p=0.6))
    assert set(drawn.tolist()) == {0, 1}


def test_top_p_is_a_share_of_what_top_k_has_left():
    # 0.4 is half of the 0.8 that two tokens hold, so one token is enough for top_p = 0.5.
    logits = torch.tensor([0.41, 0.39, 0.2]).double().log().float()
    assert set(many(logits, 500, SamplingParams(top_k=2, top_p=0.5)).tolist()) == {0}


def test_equal_logits_at_the_edge_of_top_k_leave_exactly_k():
    drawn = many(torch.zeros(200), 500, SamplingParams(top_k=3))
    assert set(drawn.tolist()) == {0, 1, 2}


def test_rows_of_a_batch_do_not_mix_their_settings():
    logits = torch.stack([random_logits(200, i) for i in range(4)])
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=3),
        SamplingParams(temperature=0.5),
        SamplingParams(top_p=0.4, temperature=2.0),
    ]
    numbers = np.array([0.9, 0.1, 0.6, 0.99])
    together = draw(logits, params, numbers, 5)
    for i in range(4):
        alone = one(logits[i], numbers[i], params[i], 5)
        assert together.tokens[i] == alone.tokens[0]
        assert_close(together.logprobs[i], alone.logprobs[0], rtol=1e-6)
        assert together.top_ids[i].tolist() == alone.top_ids[0].tolist()


def test_temperature_zero_is_the_most_likely_token():
    logits = random_logits(259, 2)
    for number in (0.0, 0.5, LAST):
        assert int(one(logits, number, SamplingParams(temperature=0.0)).tokens) == int(
            logits.argmax()
        )


def test_temperature_zero_reports_logprobs_at_temperature_one():
    logits = random_logits(259, 2)
    drawn = one(logits, 0.3, SamplingParams(temperature=0.0), top=3)
    expected = torch.log_softmax(logits.double(), 0)
    assert_close(drawn.logprobs[0], expected.max(), rtol=1e-6)
    assert_close(drawn.top_logprobs[0], expected.topk(3).values, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.25, 0.7, 1.0, 3.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (2, 1.0), (-1, 0.3), (5, 0.5)])
def test_logprobs_are_of_the_whole_vocabulary_at_the_temperature(temperature, top_k, top_p):
    logits = random_logits(300, 8)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = one(logits, 0.77, params)
    expected = torch.log_softmax(logits.double() / temperature, 0)
    assert_close(drawn.logprobs, expected[drawn.tokens], rtol=1e-6, atol=1e-6)


def test_the_alternatives_are_the_most_likely_tokens_best_first():
    logits = random_logits(300, 9)
    drawn = one(logits, 0.4, SamplingParams(temperature=0.7), top=6)
    expected = torch.log_softmax(logits.double() / 0.7, 0).topk(6)
    assert drawn.top_ids[0].tolist() == expected.indices.tolist()
    assert_close(drawn.top_logprobs[0], expected.values, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 259, 1000])
@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "zeros", "holes"])
@pytest.mark.parametrize("top", [1, 5, 64])
def test_the_alternatives_are_those_of_a_full_sort_and_of_equal_ones_the_lower_id(size, kind, top):
    plain = random_logits(size, 10)
    logits = {
        "plain": plain,
        "ties": plain.round(),
        "equal": torch.full_like(plain, -3.5),
        "zeros": torch.where(plain < 0, -0.0, 0.0),
        "holes": torch.where(plain.abs() > 1, -torch.inf, plain),
    }[kind]
    logits[size // 2] = 0.0
    drawn = one(logits, 0.4, SamplingParams(temperature=0.7), top=top)
    values = logits.tolist()
    wanted = sorted(range(size), key=lambda i: (-values[i], i))[:top]
    assert drawn.top_ids[0].tolist() == wanted
    expected = torch.log_softmax(logits.double() / 0.7, 0)[wanted]
    assert_close(drawn.top_logprobs[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 128, 129, 1000, 49152])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 100.0])
def test_entropies_are_of_the_whole_distribution_at_the_temperature(size, temperature, spread):
    logits = random_logits(size, 12, spread) - 40.0
    params = SamplingParams(temperature=temperature, top_k=3)
    numbers = np.array([0.7])
    drawn = draw(logits[None], [params], numbers, entropies=True)
    expected = torch.log_softmax(logits.double() / (temperature or 1.0), 0)
    assert drawn.entropies is not None
    assert drawn.entropies.dtype == torch.float64
    assert_close(drawn.entropies[0], -(expected.exp() * expected).sum(), rtol=1e-5, atol=1e-6)


def test_the_entropy_of_a_row_with_tokens_that_are_ruled_out():
    logits = random_logits(300, 13)
    logits[::2] = -torch.inf
    certain = torch.full((300,), -torch.inf)
    certain[7] = 2.0
    both = torch.stack([logits, certain, torch.zeros(300)])
    drawn = draw(both, [PLAIN] * 3, np.array([0.1, 0.5, 0.9]), entropies=True)
    kept = torch.log_softmax(logits[1::2].double(), 0)
    wanted = [float(-(kept.exp() * kept).sum()), 0.0, float(np.log(300))]
    assert_close(drawn.entropies, wanted, rtol=1e-6, atol=1e-7)


@given(seed=st.integers(0, 50), temperature=st.sampled_from([0.0, 0.7, 1.0, 1e-30]))
def test_what_is_reported_does_not_change_what_is_drawn(seed, temperature):
    logits = torch.stack([random_logits(259, seed + i, 4.0) for i in range(3)])
    params = [SamplingParams(temperature=temperature), PLAIN, SamplingParams(top_k=4, top_p=0.9)]
    numbers = uniforms([stream(seed, [1], i) for i in range(3)], range(3))
    plain = draw(logits, params, numbers)
    full = draw(logits, params, numbers, 5, entropies=True)
    assert plain.entropies is None
    assert plain.top_ids.shape == (3, 0)
    assert torch.equal(plain.tokens, full.tokens)
    assert torch.equal(plain.logprobs, full.logprobs)
    assert bool(torch.isfinite(full.entropies).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_precision_are_drawn_from_in_float32(dtype):
    logits = random_logits(130, 4).to(dtype)
    drawn = one(logits, 0.6)
    assert_close(
        drawn.logprobs, torch.log_softmax(logits.float().double(), 0)[drawn.tokens], rtol=1e-5
    )


def test_the_logits_that_were_passed_are_left_alone():
    logits = random_logits(130, 4)[None]
    before = logits.clone()
    draw(logits, [SamplingParams(top_k=2, temperature=0.5)], np.array([0.5]), 3, entropies=True)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [128, 130])
def test_logits_that_are_not_finite_are_an_error(bad, size):
    logits = random_logits(size, 1)
    logits[3] = bad
    with pytest.raises(SamplerError, match="logits are not finite"):
        one(logits, 0.9)


def test_numbers_fill_the_unit_interval_evenly():
    keys = [stream(s, [3], i) for s in range(20) for i in range(50)]
    numbers = np.concatenate([uniforms(keys, [p] * len(keys)) for p in range(50)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    seen = np.histogram(numbers, bins=100, range=(0, 1))[0]
    expected = len(numbers) / 100
    assert ((seen - expected) ** 2 / expected).sum() < chi_square_limit(99)


def test_neighbouring_numbers_are_not_related():
    numbers = uniforms([stream(0, [1], 0)] * 20_000, range(20_000))
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 4 / len(numbers) ** 0.5


def test_neighbouring_samples_are_not_related():
    keys = [stream(0, [1], i) for i in range(20_000)]
    numbers = uniforms(keys, [0] * len(keys))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / len(numbers) ** 0.5


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    prompt=st.lists(st.integers(0, 60_000), min_size=1, max_size=6),
    sample=st.integers(0, 4095),
    position=st.integers(0, 10_000),
)
def test_a_number_is_a_function_of_seed_prompt_sample_and_position(seed, prompt, sample, position):
    number = uniforms([stream(seed, prompt, sample)], [position])[0]
    assert number == uniforms([stream(seed, tuple(prompt), sample)], [position])[0]
    others = [
        (seed + 1, prompt, sample, position),
        (seed, [*prompt, 0], sample, position),
        (seed, [prompt[0] + 1, *prompt[1:]], sample, position),
        (seed, prompt, sample + 1, position),
        (seed, prompt, sample, position + 1),
    ]
    for s, p, i, at in others:
        assert number != uniforms([stream(s, p, i)], [at])[0]


def test_streams_do_not_meet():
    keys = {stream(s, [p], i) for s in range(20) for p in range(20) for i in range(20)}
    assert len(keys) == 8000


def test_the_greatest_word_gives_a_number_below_one():
    words = np.asarray([2**64 - 1], dtype=np.uint64)
    assert float((words >> np.uint64(11)).astype(np.float64)[0] * 2.0**-53) == LAST
