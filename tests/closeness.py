"""The one way in which tests compare numbers."""

import numpy as np
import torch

LOOSEST_RTOL = 1e-3


def assert_close(actual: object, expected: object, *, rtol: float, atol: float = 0.0) -> None:
    """Assert that |actual - expected| <= atol + rtol * |expected| for every element.

    Args:
        actual: a number, nested list, numpy array or torch tensor; shapes must be equal.
        expected: the same.
        rtol: relative tolerance, at most 1e-3: what is further apart is not the same number.
        atol: absolute tolerance, in the unit of the values.

    Raises:
        AssertionError: the values differ (the message shows the worst element), one of them is NaN,
            or the shapes differ.
        ValueError: a tolerance is too loose, negative or NaN.
    """
    if not 0 <= rtol <= LOOSEST_RTOL:
        raise ValueError(f"rtol is {rtol}: pass 0 to {LOOSEST_RTOL}, or an atol with a reason")
    if not atol >= 0:
        raise ValueError(f"atol is {atol}: pass a number >= 0")
    got, wanted = _array(actual), _array(expected)
    if got.shape != wanted.shape:
        raise AssertionError(f"shape {got.shape} is not the expected {wanted.shape}")
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(got == wanted, 0.0, np.abs(got - wanted))
        allowed = np.where(np.isfinite(wanted), atol + rtol * np.abs(wanted), 0.0)
    wrong = ~(gap <= allowed)
    if wrong.any():
        excess = np.where(wrong, np.nan_to_num(gap - allowed, nan=np.inf, posinf=np.inf), -1.0)
        worst = np.unravel_index(int(excess.argmax()), got.shape)
        raise AssertionError(
            f"{int(wrong.sum())} of {got.size} elements differ; worst at "
            f"{tuple(map(int, worst))}: got {got[worst]!s}, expected {wanted[worst]!s}, "
            f"off by {gap[worst]:.3g}, allowed {allowed[worst]:.3g}"
        )


def _array(values: object) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
