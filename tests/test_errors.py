import pickle

import pytest

from xorl_lab import errors

EVERY = [
    errors.LabError("a"),
    errors.ConfigError("a"),
    errors.DataError("a"),
    errors.ShapeError("a"),
    errors.EngineError("a"),
    errors.SamplerError("a", retryable=True),
    errors.CheckpointError("validation.some_code", "a", {"b": [1]}),
    errors.StoreError("a"),
    errors.CancelledError("a"),
]


def test_every_error_is_listed_here():
    defined = {
        e for e in vars(errors).values() if isinstance(e, type) and e.__module__ == errors.__name__
    }
    assert defined == {type(e) for e in EVERY}


@pytest.mark.parametrize("error", EVERY, ids=lambda e: type(e).__name__)
def test_errors_pickle(error):
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("error", EVERY, ids=lambda e: type(e).__name__)
def test_every_error_is_a_lab_error(error):
    assert isinstance(error, errors.LabError)


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.DataError, errors.ShapeError])
def test_what_a_caller_got_wrong_is_a_value_error(kind):
    assert issubclass(kind, ValueError)


def test_checkpoint_error_carries_code_message_and_details():
    error = errors.CheckpointError("checkpoint.exists", "it is taken", {"name": "a"})

    assert (error.code, error.message, error.details) == (
        "checkpoint.exists",
        "it is taken",
        {"name": "a"},
    )
    assert str(error) == "checkpoint.exists: it is taken"


def test_sampler_error_is_not_retryable_unless_it_says_so():
    assert not errors.SamplerError("a").retryable
