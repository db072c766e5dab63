"""The names that a person may rely on."""

import os
import subprocess
import sys

import pytest

import xorl_lab

PUBLIC = [
    "APIFuture",
    "AdamParams",
    "BatchSampleResult",
    "Datum",
    "ForwardBackwardOutput",
    "Lab",
    "ModelInput",
    "OptimStepResponse",
    "Run",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SaveWeightsResponse",
    "ServiceClient",
    "TensorData",
    "Track",
    "TrainingClient",
    "__version__",
    "errors",
    "explore_losses",
    "loss_curve",
    "losses",
    "types",
]


def test_public_names_are_these_and_sorted():
    assert xorl_lab.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC
    assert dir(xorl_lab) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name):
    assert getattr(xorl_lab, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'xorl_lab' has no attribute 'Trainer'"):
        xorl_lab.Trainer  # noqa: B018


IMPORT = """
import sys, time
start = time.process_time()
import xorl_lab
xorl_lab.Datum(xorl_lab.ModelInput.from_ints([1, 2]), {"labels": [1, 2], "weights": [0.0, 1.0]})
xorl_lab.AdamParams(), xorl_lab.SamplingParams(), xorl_lab.errors.LabError
print(time.process_time() - start)
heavy = {"torch", "transformers", "peft", "pandas", "plotly", "IPython"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_importing_is_cheap_and_does_not_import_torch():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1.0, "seconds of processor time"


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "20000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_threads_wait_awake_for_a_while_unless_the_user_has_chosen(chosen, expected):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    given = {k: v for k, v in os.environ.items() if k not in names} | chosen
    code = "import os, xorl_lab; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=given
    )
    assert done.stdout.strip() == expected


def test_losses_are_imported_on_first_use():
    code = (
        "import sys, xorl_lab; assert 'xorl_lab.losses' not in sys.modules; "
        "xorl_lab.losses; assert 'xorl_lab.losses' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
