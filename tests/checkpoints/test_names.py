import logging
import re
from pathlib import Path

import pytest

from xorl_lab.checkpoints import Address, check_name
from xorl_lab.checkpoints.names import check_model_id
from xorl_lab.errors import CheckpointError

LONG = "a" * 201
SPACED = "a b" * 67


@pytest.mark.parametrize("name", ["a", "a-", "a_", "v1.0", "step-100", "0", "a" * 200])
def test_good_names_stay_as_they_are(name, caplog):
    assert check_name(name) == name
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "changed"),
    [("step 100", "step-100"), ("a  b", "a--b"), ("step ", "step-"), ("a b.c d", "a-b.c-d")],
)
def test_spaces_become_hyphens_with_a_warning(name, changed, caplog):
    with caplog.at_level(logging.WARNING):
        assert check_name(name) == changed
    assert [r.getMessage() for r in caplog.records] == [
        f"checkpoint name {name!r} was changed to {changed!r}"
    ]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        (LONG, "a" * 180 + "a92efd82109373e58f9a"),
        (SPACED, ("a-b" * 67)[:180] + "d2e08a127a4bfebbe414"),
    ],
)
def test_long_names_are_shortened_with_a_digest_and_a_warning(name, changed, caplog):
    with caplog.at_level(logging.WARNING):
        assert check_name(name) == changed
    assert len(changed) == 200
    assert "was shortened to" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        " a",
        ".a",
        "a.",
        "-a",
        "_a",
        "é",
        "aé",
        "a/b",
        "a\\b",
        "a:b",
        "a\t",
        "a\tb",
        "a\n",
        "a\x00",
        "..",
        "../a",
        None,
        5,
        b"a",
        ["a"],
        Path("a"),
        "a" * 200 + ".",
    ],
)
def test_bad_names_are_refused(name):
    with pytest.raises(CheckpointError) as caught:
        check_name(name)
    assert caught.value.code == "validation.invalid_checkpoint_name"
    assert caught.value.message == (
        f"{name!r} cannot name a checkpoint: start with an ASCII letter or digit, go on with "
        "letters, digits, '.', '_' or '-', and do not end with '.'"
    )
    assert caught.value.details == {"name": name}


@pytest.mark.parametrize("model_id", ["default", "a", "0-_", "a" * 128])
def test_good_model_ids(model_id):
    assert check_model_id(model_id) == model_id


@pytest.mark.parametrize("model_id", ["", "-a", "_a", "a.b", "a b", "a\n", "a" * 129, None, 1])
def test_bad_model_ids(model_id):
    with pytest.raises(CheckpointError) as caught:
        check_model_id(model_id)
    assert caught.value.code == "validation.invalid_model_id"


def test_an_address_round_trips():
    address = Address.parse("xorl://my-model/sampler_weights/v1.0")
    assert address == Address("my-model", "sampler_weights", "v1.0")
    assert address.uri == "xorl://my-model/sampler_weights/v1.0"
    assert address.folder(Path("/r")) == Path("/r/my-model/sampler_weights/v1.0")


@pytest.mark.parametrize(
    ("uri", "code"),
    [
        ("xorl://m/other/a", "validation.invalid_checkpoint_path"),
        ("xorl://m/weights", "validation.invalid_checkpoint_path"),
        ("xorl://m/weights/a/b", "validation.invalid_checkpoint_path"),
        ("xorl://m/weights/a\n", "validation.invalid_checkpoint_name"),
        ("http://m/weights/a", "validation.invalid_checkpoint_path"),
        ("/tmp/a", "validation.invalid_checkpoint_path"),
        ("xorl://../weights/a", "validation.invalid_model_id"),
        ("xorl://m/weights/..", "validation.invalid_checkpoint_name"),
        (None, "validation.invalid_checkpoint_path"),
        (Path("a"), "validation.invalid_checkpoint_path"),
    ],
)
def test_bad_addresses_are_refused(uri, code):
    with pytest.raises(CheckpointError, match=f"^{re.escape(code)}: ") as caught:
        Address.parse(uri)
    assert caught.value.code == code
