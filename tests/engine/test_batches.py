import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.support import CONTEXT, VOCABULARY, batch, exactly, labelled, shifted
from xorl_lab.engine.batches import align
from xorl_lab.errors import DataError, ShapeError
from xorl_lab.types import Datum, ModelInput, TensorData

TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=20)


def only(datum: Datum, loss_fn: str = "cross_entropy"):
    """The one row of a batch of one datum."""
    (row,) = batch([datum], loss_fn).rows
    return row


@given(TOKENS)
def test_labels_are_shifted_by_one(tokens):
    row = only(labelled(tokens))
    assert row.tokens.tolist() == tokens[:-1]
    assert row.targets.tolist() == tokens[1:]
    assert row.weights.tolist() == [1.0] * (len(tokens) - 1)


@given(TOKENS)
def test_target_tokens_are_taken_as_they_are(tokens):
    row = only(Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens[::-1]}))
    assert row.tokens.tolist() == tokens
    assert row.targets.tolist() == tokens[::-1]


@given(TOKENS, st.data())
def test_extras_of_length_n_and_n_minus_1_mean_the_same(tokens, data):
    values = data.draw(st.lists(st.floats(-5, 5), min_size=len(tokens), max_size=len(tokens)))
    weights = [1.0] * len(tokens)
    long = only(labelled(tokens, weights=weights, advantages=values))
    short = only(labelled(tokens, weights=weights[1:], advantages=values[1:]))
    already = only(shifted(tokens, weights=weights[1:], advantages=values[1:]))
    for row in (short, already):
        assert row.tokens.tolist() == long.tokens.tolist()
        assert row.targets.tolist() == long.targets.tolist()
        assert row.extras["advantages"].tolist() == long.extras["advantages"].tolist()


@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.floats(-9, -0.01), st.floats(-2, 2)), min_size=1, max_size=8),
)
def test_without_weights_exactly_the_prompt_of_rl_data_is_masked(prompt, completion):
    tokens = list(range(prompt + 1 + len(completion)))
    logprobs = [0.0] * prompt + [lp for lp, _ in completion]
    advantages = [0.0] * prompt + [a for _, a in completion]
    row = only(labelled(tokens, logprobs=logprobs, advantages=advantages), "policy_loss")
    assert row.weights.tolist() == [0.0] * prompt + [1.0] * len(completion)


def test_a_zero_inside_the_completion_stays_trained():
    row = only(
        labelled([1, 2, 3, 4, 5], logprobs=[0, 0, -1, 0, -2], advantages=[0, 0, 0, 0, 0]),
        "policy_loss",
    )
    assert row.weights.tolist() == [0, 1, 1, 1]


def test_a_zero_advantage_does_not_mask_a_sampled_token():
    row = only(labelled([1, 2, 3], logprobs=[0, -1, -1], advantages=[0, 0, 0]), "policy_loss")
    assert row.weights.tolist() == [1, 1]


def test_given_weights_overrule_the_guess():
    row = only(
        labelled([1, 2, 3], logprobs=[0, 0, -1], advantages=[0, 0, 1], weights=[1, 1, 0]),
        "policy_loss",
    )
    assert row.weights.tolist() == [1, 0]


def test_supervised_data_without_weights_is_trained_throughout():
    assert only(labelled([1, 2, 3])).weights.tolist() == [1, 1]


def test_target_minus_100_is_not_trained():
    row = only(Datum(ModelInput.from_ints([1, 2, 3]), {"labels": [1, -100, 3]}))
    assert row.weights.tolist() == [0, 1]
    row = only(Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [-100, 3], "weights": [2, 2]}))
    assert row.weights.tolist() == [0, 2]


def test_untrained_targets_may_hold_anything():
    row = only(Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [9999, 3], "weights": [0, 1]}))
    assert row.trained.tolist() == [1]


@pytest.mark.parametrize(
    "datum",
    [
        labelled([1, 2, 3], weights=[0, 0, 0]),
        labelled([1, 2, 3], logprobs=[0, 0, 0], advantages=[0, 0, 0]),
        Datum(ModelInput.from_ints([1, 2]), {"labels": [-100, -100]}),
    ],
)
def test_a_row_without_signal_is_left_out_and_counted(datum):
    aligned = batch([datum, labelled([4, 5]), datum])
    assert [row.datum for row in aligned.rows] == [1]
    assert (aligned.rows_without_signal, aligned.valid_tokens) == (2, 1)
    assert aligned.lengths == [len(datum.model_input.tokens) - 1, 1, aligned.lengths[0]]


def test_a_batch_without_any_signal_is_no_error():
    assert batch([labelled([1, 2], weights=[0, 0])]).rows == []


def test_ids_typed_float32_are_exact():
    ids = [2.0, 258.0]
    datum = Datum(ModelInput.from_ints([1, 2]), {"labels": TensorData(ids, "float32")})
    assert only(datum).targets.tolist() == [258]


LONG = list(range(200)) * 3
UNKNOWN = (
    "data[0] has unknown loss inputs ['mask']: choose from ['advantages', 'labels', 'logprobs', "
    "'ref_logprobs', 'rollout_logprobs', 'target_tokens', 'weights']"
)
FORMS = (
    "of 'labels' and 'target_tokens': pass exactly one (labels = the token ids themselves, "
    "target_tokens = already shifted by one)"
)


@pytest.mark.parametrize(
    ("data", "loss_fn", "kind", "message"),
    [
        ([], "cross_entropy", DataError, "data is an empty list: pass at least one Datum"),
        (None, "cross_entropy", DataError, "data is a NoneType: pass a list of Datum"),
        ("data", "cross_entropy", DataError, "data is a str: pass a list of Datum"),
        (labelled([1, 2]), "cross_entropy", DataError, "data is a Datum: pass a list of Datum"),
        ([[1, 2]], "cross_entropy", DataError, "data[0] is a list: pass a list of Datum"),
        (
            [labelled([1, 2]), None],
            "cross_entropy",
            DataError,
            "data[1] is a NoneType: pass a list of Datum",
        ),
        (
            [Datum(ModelInput.empty(), {"labels": []})],
            "cross_entropy",
            DataError,
            "data[0] has 0 tokens, too few to predict one from another: with 'labels' pass at "
            "least 2",
        ),
        (
            [labelled([7])],
            "cross_entropy",
            DataError,
            "data[0] has 1 tokens, too few to predict one from another: with 'labels' pass at "
            "least 2",
        ),
        (
            [Datum(ModelInput.empty(), {"target_tokens": []})],
            "cross_entropy",
            DataError,
            "data[0] has 0 tokens, too few to predict one from another: with 'target_tokens' "
            "pass at least 1",
        ),
        (
            [labelled([1, 259, 3])],
            "cross_entropy",
            DataError,
            "data[0] has token id 259, but this model's ids are 0 to 258: encode the text with "
            "this model's tokenizer",
        ),
        (
            [labelled([1, -1, 3])],
            "cross_entropy",
            DataError,
            "data[0] has token id -1, but this model's ids are 0 to 258: encode the text with "
            "this model's tokenizer",
        ),
        (
            [labelled([1, 2]), shifted([1, 999])],
            "cross_entropy",
            DataError,
            "data[1] has target id 999, but this model's ids are 0 to 258: encode the text with "
            "this model's tokenizer",
        ),
        (
            [labelled(LONG)],
            "cross_entropy",
            DataError,
            "data[0] has 600 tokens, but the model's context holds 512: shorten it",
        ),
        (
            [Datum(ModelInput.from_ints(LONG[:513]), {"target_tokens": LONG[:513]})],
            "cross_entropy",
            DataError,
            "data[0] has 513 tokens, but the model's context holds 512: shorten it",
        ),
        (
            [Datum(ModelInput.from_ints([1, 2, 3]), {"labels": [1, 2]})],
            "cross_entropy",
            ShapeError,
            "data[0]: labels has 2 entries but there are 3 input tokens: pass one per token",
        ),
        (
            [labelled([1, 2, 3], weights=[1, 1, 1, 1])],
            "cross_entropy",
            ShapeError,
            "data[0]: weights has 4 entries but there are 2 targets: pass 2 (or 3, one per token)",
        ),
        (
            [shifted([1, 2, 3], weights=[1])],
            "cross_entropy",
            ShapeError,
            "data[0]: weights has 1 entries but there are 2 targets: pass 2",
        ),
        (
            [labelled([1, 2, 3], weights=np.ones((3, 1)))],
            "cross_entropy",
            ShapeError,
            "data[0]: weights has shape [3, 1]: pass one number per token",
        ),
        ([labelled([1, 2], mask=[1, 1])], "cross_entropy", DataError, UNKNOWN),
        (
            [Datum(ModelInput.from_ints([1, 2]), {"weights": [1, 1]})],
            "cross_entropy",
            DataError,
            f"data[0] has neither {FORMS}",
        ),
        (
            [labelled([1, 2], target_tokens=[1, 2])],
            "cross_entropy",
            DataError,
            f"data[0] has both {FORMS}",
        ),
        (
            [labelled([1, 2], advantages=[0, 1])],
            "policy_loss",
            DataError,
            "data[0] lacks ['logprobs'], which the loss needs: add them to loss_fn_inputs",
        ),
        (
            [labelled([1, 2])],
            "importance_sampling",
            DataError,
            "data[0] lacks ['logprobs', 'advantages'], which the loss needs: add them to "
            "loss_fn_inputs",
        ),
        (
            [labelled([1, 2, 3], logprobs=[0, -1, -1], advantages=[0, 1, np.nan])],
            "policy_loss",
            DataError,
            "data[0]: advantages is nan at target 1: pass finite numbers, and leave out a sample "
            "whose value is not known",
        ),
        (
            [labelled([1, 2, 3], weights=[0, 1e39, 1])],
            "cross_entropy",
            DataError,
            "data[0]: weights is inf at target 0: pass finite numbers, and leave out a sample "
            "whose value is not known",
        ),
        (
            [labelled([1, 2], weights=TensorData(["a", "b"]))],
            "cross_entropy",
            DataError,
            "data[0]: weights does not hold numbers: pass one per token",
        ),
        (
            [labelled([1, 2], weights=TensorData(None))],
            "cross_entropy",
            DataError,
            "data[0]: weights does not hold numbers: pass one per token",
        ),
        (
            [Datum(ModelInput.from_ints([1, 2]), {"labels": TensorData([1.0, 2.5])})],
            "cross_entropy",
            DataError,
            "data[0]: labels has entries that are not token ids: pass integers",
        ),
        (
            [Datum(ModelInput.from_ints([1, 2]), {"labels": TensorData([1.0, np.nan])})],
            "cross_entropy",
            DataError,
            "data[0]: labels has entries that are not token ids: pass integers",
        ),
    ],
)
def test_data_that_cannot_be_used_is_refused(data, loss_fn, kind, message):
    with pytest.raises(kind, match=exactly(message)):
        batch(data, loss_fn)


def test_an_id_beyond_64_bits_is_refused():
    datum = Datum(ModelInput.from_ints([1, 2**70]), {"labels": [1, 2]})
    with pytest.raises(
        DataError,
        match=exactly("data[0]: model_input has entries that are not token ids: pass integers"),
    ):
        batch([datum])


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
def test_the_context_holds_all_inputs_and_the_last_target_beside_them(length):
    datum = labelled((LONG * 2)[:length])
    assert len(only(datum).tokens) == length - 1


def test_the_message_names_the_loss():
    with pytest.raises(
        DataError,
        match=exactly(
            "data[0] lacks ['advantages'], which policy_loss needs: add them to loss_fn_inputs"
        ),
    ):
        align(
            [labelled([1, 2], logprobs=[0, -1])],
            required=["logprobs", "advantages"],
            loss_fn="policy_loss",
            vocab_size=VOCABULARY,
            context_length=CONTEXT,
        )
