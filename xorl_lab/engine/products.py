"""x W' + b of frozen weights on a CPU, where models spend their time.

oneDNN's kernels take weights in a layout of their own.  With few rows they are two to three times
as fast as torch's product, with many a tenth (docs/LOG.md).  The price is a copy of the weights,
made when they are first needed.  torch reaches these kernels by operators that are not public, so
they are tried first, and where they fail or differ torch's own product stands in.
"""

import functools
from typing import Any, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

LIMIT = 2 * 2**30
"""Bytes of weights up to which a model gets copies in that layout."""
ROWS = 64
"""Rows of x for which the layout is chosen; the others profit alike."""
_layouts = WeakTensorKeyDictionary()


def prepare(model: torch.nn.Module) -> None:
    """Let a model's frozen linear layers have copies of their weights, if it is not too big."""
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    fit = [w for w in weights if _suits(w) and not w.requires_grad]
    if fit and sum(w.nbytes for w in fit) <= LIMIT and _works():
        _layouts.update(dict.fromkeys(fit))


def may_be_copied(weight: torch.Tensor) -> bool:
    """Whether a weight is frozen and of a model that :func:`prepare` has let have copies."""
    return weight in _layouts and _works()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(N, in) -> (N, out), without gradient.

    Args:
        x: (N, in).
        weight: (out, in); must not change once :func:`prepare` was told of it.
        bias: (out,).
    """
    if _suits(weight) and x.dtype == torch.float32 and _works():
        return _product(x, _layout_of(weight), bias)
    return torch.nn.functional.linear(x, weight, bias)


class Matrix:
    """:func:`linear` by one matrix many times, for which its layout is looked up once.

    Args:
        weight: (out, in).
        bias: (out,).
        copied: the weight is the caller's own copy, and is held in the kernel's layout instead.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, copied: bool = False
    ) -> None:
        self._weight: torch.Tensor = weight
        self._bias = bias
        self._fast = _suits(weight) and _works()
        if self._fast:
            self._weight = _reordered(weight) if copied else _layout_of(weight)

    def __call__(self, x: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
        """(N, in) -> (N, out), added to ``plus``, (N, out), which is left as it is."""
        if self._fast:
            return _product(x, self._weight, self._bias, plus)
        out = torch.nn.functional.linear(x, self._weight, self._bias)
        return out if plus is None else out.add_(plus)


def _layout_of(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the kernel's layout, if it may have a copy; or as it is."""
    if weight not in _layouts:
        return weight
    layout = cast("torch.Tensor | None", _layouts[weight])
    if layout is None:
        layout = _layouts[weight] = _reordered(weight)
    return layout


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


def _suits(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _product(
    x: torch.Tensor,
    layout: torch.Tensor,
    bias: torch.Tensor | None,
    plus: torch.Tensor | None = None,
) -> torch.Tensor:
    product, added = _kernels()
    if plus is not None:
        return added(x, plus, layout, bias, "add")
    return product(x, layout, bias, "none", [], "")


@functools.cache  # looking an operator up at each use costs as much as starting it
def _kernels() -> tuple[Any, Any]:
    """The products without and with something to add them to."""
    operator = torch.ops.mkldnn._linear_pointwise
    return operator.default, operator.binary


@functools.cache
@torch.no_grad()
def _works() -> bool:
    """Whether the operators are there and give what torch's product gives."""
    draw = torch.Generator().manual_seed(0)
    x, weight, bias, plus = (torch.randn(n, generator=draw) for n in ((3, 5), (7, 5), (7,), (3, 7)))
    wanted = torch.nn.functional.linear(x, weight, bias)
    try:
        for layout in (weight, _reordered(weight)):
            torch.testing.assert_close(_product(x, layout, bias), wanted)
            torch.testing.assert_close(_product(x, layout, bias, plus), wanted + plus)
    except (AssertionError, AttributeError, RuntimeError, TypeError):
        return False
    return True
