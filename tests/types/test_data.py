import re

import numpy as np
import pytest
import torch

from tests.closeness import assert_close
from xorl_lab.errors import DataError, ShapeError
from xorl_lab.types import Datum, ModelInput, TensorData

WORDS = ModelInput.from_ints([1, 2, 3])


@pytest.mark.parametrize(
    "tokens",
    [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), iter([1, 2]), [np.int32(1), True + 1]],
)
def test_tokens_may_come_in_any_container(tokens):
    given = ModelInput.from_ints(tokens)
    assert given.tokens == (1, 2)
    assert all(type(t) is int for t in given.tokens)


@pytest.mark.parametrize("make", [ModelInput, ModelInput.from_ints])
@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ("ab", "'str' object cannot be interpreted as an integer"),
        ([1.5], "'float' object cannot be interpreted as an integer"),
        ([None], "'NoneType' object cannot be interpreted as an integer"),
        (None, "'NoneType' object is not iterable"),
        (5, "'int' object is not iterable"),
        ([[1, 2]], "'list' object cannot be interpreted as an integer"),
    ],
)
def test_what_is_no_token_id_is_refused(make, tokens, why):
    message = (
        f"token ids must be integers, but {why}: "
        "encode text with get_tokenizer().encode(text) first"
    )
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        make(tokens)


def test_inputs_are_appended_to_without_changing_them():
    longer = WORDS.append([4]).append(ModelInput.from_ints([5])).append_int(6)
    assert longer.to_ints() == [1, 2, 3, 4, 5, 6]
    assert (longer.length, WORDS.length, ModelInput.empty().length) == (6, 3, 0)


def test_tensors_keep_numbers_and_shape():
    array = np.arange(6.0).reshape(2, 3)
    for data in (TensorData.from_numpy(array), TensorData.from_torch(torch.tensor(array))):
        assert (data.dtype, data.shape) == ("float32", [2, 3])
        assert data.tolist() == array.tolist()
        assert_close(data.to_torch(), array, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_any_precision_are_taken(dtype):
    data = TensorData.from_torch(torch.tensor([0.5, -2.0], dtype=dtype, requires_grad=True))
    assert (data.dtype, data.data) == ("float32", [0.5, -2.0])


def test_the_json_form_round_trips():
    data = TensorData.from_numpy(np.array([1, 2, 3]))
    assert data.to_dict() == {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}
    assert TensorData.from_dict(data.to_dict()).tolist() == [1, 2, 3]


def test_shape_and_count_must_agree():
    message = re.escape(
        "TensorData has 2 numbers but shape [3]: make the product of the shape equal the count"
    )
    with pytest.raises(ShapeError, match=f"^{message}$"):
        TensorData([1, 2], "int64", [3])


def test_an_unknown_dtype_is_refused():
    with pytest.raises(DataError, match=r"^TensorData dtype is 'int8': use 'float32' or 'int64'$"):
        TensorData([1], "int8")


@pytest.mark.parametrize(
    "value", [[1, 2, 3], (1, 2, 3), [1.0, 2.0, 3.0], np.array([1, 2, 3], np.int32), np.ones(3) * 2]
)
def test_token_ids_become_integers(value):
    assert Datum(WORDS, {"labels": value}).loss_fn_inputs["labels"].dtype == "int64"


@pytest.mark.parametrize("value", [[1, 2, 3], np.array([1, 2, 3]), [0.5, 1, 2], [True, False, 1]])
def test_other_inputs_become_real_numbers(value):
    assert Datum(WORDS, {"weights": value}).loss_fn_inputs["weights"].dtype == "float32"


def test_large_ids_survive():
    ids = [2**24 + 1, 2**31 + 3, 5]
    assert Datum(WORDS, {"labels": ids}).loss_fn_inputs["labels"].data == ids


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "labels",
            "abc",
            "loss input 'labels' has entries that are not numbers (a str of dtype <U3): "
            "pass one number per token",
        ),
        (
            "weights",
            None,
            "loss input 'weights' has entries that are not numbers (a NoneType of dtype object): "
            "pass one number per token",
        ),
        (
            "advantages",
            [1.0, None],
            "loss input 'advantages' has entries that are not numbers (a list of dtype object): "
            "pass one number per token",
        ),
        ("labels", [[1], [2, 3]], "loss input 'labels' is ragged: pass one number per token"),
        (
            "labels",
            [1.5, 2.0, 3.0],
            "loss input 'labels' has entries that are not integers: pass token ids",
        ),
        (
            "target_tokens",
            [1.0, float("nan"), 3.0],
            "loss input 'target_tokens' has entries that are not integers: pass token ids",
        ),
    ],
)
def test_inputs_that_are_not_numbers_are_refused(name, value, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        Datum(WORDS, {name: value})


def test_a_number_too_large_for_float32_becomes_inf_without_a_warning():
    assert Datum(WORDS, {"weights": [1e39, 1, 1]}).loss_fn_inputs["weights"].data[0] == np.inf


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (["a"], {}),
            "model_input is a list: pass ModelInput.from_ints(token_ids)",
        ),
        ((WORDS, None), "loss_fn_inputs is a NoneType: pass a dict from name to numbers"),
        ((WORDS, [1, 2]), "loss_fn_inputs is a list: pass a dict from name to numbers"),
    ],
)
def test_a_datum_of_wrong_types_is_refused(given, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        Datum(*given)


def test_a_datum_has_the_wire_form():
    datum = Datum(WORDS, {"labels": [1, 2, 3]}, routed_experts=[[[0]]])
    assert datum.to_dict() == {
        "model_input": {"input_ids": [1, 2, 3]},
        "loss_fn_inputs": {"labels": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}},
        "routed_experts": [[[0]]],
    }
    assert repr(datum) == "Datum(3 tokens; labels[3])"
