"""LoRA adapters on a shared base: made by peft, initialised and drawn from private generators.

An adapter is a dictionary of tensors under PEFT's file names,
``base_model.model.MODULE.lora_A.weight`` (r, in) and ``….lora_B.weight`` (out, r).
"""

import logging
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import PreTrainedModel

from xorl_lab.engine.lora import ADAPTER, LoraLinear
from xorl_lab.engine.quiet import quiet
from xorl_lab.engine.sharing import share
from xorl_lab.errors import ConfigError
from xorl_lab.types import LoraRunSpec

logger = logging.getLogger(__name__)
PREFIX = "base_model.model."
"""What PEFT puts before the module's name in its files."""

Tensors = Mapping[str, torch.Tensor]


class PrivateDropout(torch.nn.Module):
    """Dropout that draws from a generator of its own, and only while ``active``."""

    def __init__(self, p: float, generator: torch.Generator) -> None:
        super().__init__()
        self.p = p
        self.generator = generator
        self.active = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zero a share p of the entries and scale the others by 1 / (1 - p)."""
        if not self.active:
            return x
        # The dtype is named: the user's default dtype would change the numbers drawn.
        keep = torch.rand(x.shape, generator=self.generator, dtype=torch.float32) >= self.p
        return x * keep.to(x.device, x.dtype) / (1.0 - self.p)


def linear_layers(model: PreTrainedModel) -> dict[str, list[str]]:
    """Names of the linear layers by part of the network: ``attn``, ``mlp``, ``unembed``."""
    head = model.get_output_embeddings()
    parts: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if module is head:
            parts["unembed"].append(name)
        elif "attn" in name or "attention" in name:
            parts["attn"].append(name)
        elif not name.endswith((".gate", ".router")):
            parts["mlp"].append(name)
    return parts


def target_names(model: PreTrainedModel, spec: LoraRunSpec) -> list[str]:
    """The linear layers that an adapter of this shape is put on.

    Raises:
        ConfigError: a name of ``target_modules`` fits no linear layer, or there is none to adapt.
    """
    parts = linear_layers(model)
    if spec.target_modules is None:
        switches = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
        names = [name for part, on in switches.items() if on for name in parts[part]]
        for part, on in switches.items():
            if on and not parts[part]:
                logger.warning(
                    "the adapter leaves out %s: this model has no linear layers there (experts "
                    "that are fused into one tensor cannot be adapted)",
                    f"train_{part}",
                )
    else:
        every = [name for part in parts.values() for name in part]
        names = []
        for wanted in spec.target_modules:
            found = [n for n in every if n == wanted or n.endswith("." + wanted)]
            if not found:
                leaves = sorted({n.rsplit(".", 1)[-1] for n in every})
                raise ConfigError(
                    f"target_modules has {wanted!r}, which is no linear layer of this model: "
                    f"choose from {leaves}"
                )
            names += found
    if not names:
        raise ConfigError("this choice of layers leaves nothing to train: widen it")
    return sorted(set(names))


def inject(base: PreTrainedModel, spec: LoraRunSpec, generator: torch.Generator) -> PreTrainedModel:
    """A module tree on the weights of ``base`` with a fresh adapter: A uniform, B zero.

    Args:
        base: the base model; it stays as it is.
        spec: shape of the adapter.
        generator: draws A's initial values and, later, the dropout.

    Returns:
        The tree.  Its adapter has float32 weights (float64 in a float64 model) with gradient.

    Source: Hu et al. 2021, §4.1; A as in peft: Kaiming uniform with a = sqrt(5).
    """
    names = target_names(base, spec)
    model = share(base)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  (typed int, used as float)
        lora_dropout=spec.dropout,
        target_modules=names,
    )
    # What peft documents for layers of one's own, in spite of its name.
    config._register_custom_module(  # pyright: ignore[reportPrivateUsage]
        {torch.nn.Linear: LoraLinear}
    )
    # On the meta device nothing is drawn from the global generator that user code shares.
    with torch.device("meta"), quiet():
        inject_adapter_in_model(config, model, ADAPTER)
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    for layer in lora_layers(model).values():
        down, up = layer.pair
        a = torch.empty(down.weight.shape, dtype=dtype, device="cpu")
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        down.weight = torch.nn.Parameter(a.to(base.device))
        up.weight = torch.nn.Parameter(
            torch.zeros(up.weight.shape, dtype=dtype, device=base.device)
        )
        if spec.dropout:
            layer.lora_dropout[ADAPTER] = PrivateDropout(spec.dropout, generator)
    return model


def lora_layers(model: torch.nn.Module) -> dict[str, LoraLinear]:
    """The adapted layers of a module tree by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, LoraLinear)}


def parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The adapter's weights under PEFT's file names."""
    result: dict[str, torch.nn.Parameter] = {}
    for name, layer in lora_layers(model).items():
        down, up = layer.pair
        result[f"{PREFIX}{name}.lora_A.weight"] = cast("torch.nn.Parameter", down.weight)
        result[f"{PREFIX}{name}.lora_B.weight"] = cast("torch.nn.Parameter", up.weight)
    return result


@contextmanager
def dropout(model: torch.nn.Module, generator: torch.Generator) -> Generator[None]:
    """Switch the adapter's dropout on inside the block (training), off for everything else.

    A block that raises leaves the generator as it was, so that a failed call draws nothing.
    """
    modules = [module for module in model.modules() if isinstance(module, PrivateDropout)]
    before = generator.get_state()
    for module in modules:
        module.active = True
    try:
        yield
    except BaseException:
        generator.set_state(before)
        raise
    finally:
        for module in modules:
            module.active = False


def _linear(model: torch.nn.Module, name: str) -> torch.nn.Linear:
    return cast("torch.nn.Linear", model.get_submodule(name))


class MergedCopy:
    """A module tree on the base's weights in which some layers hold W + alpha / r * B A.

    One copy serves one version after another; the base's own weights are never written.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self.base = base
        self.model = share(base)
        self._own: dict[str, torch.nn.Parameter] = {}

    def load(self, tensors: Tensors, scale: float) -> None:
        """Put an adapter's weights in; the product is computed in float32 and rounded once.

        Args:
            tensors: the adapter, under PEFT's file names.
            scale: alpha / r.
        """
        wanted = {key.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for key in tensors}
        for name in set(self._own) - wanted:
            _linear(self.model, name).weight = _linear(self.base, name).weight
            del self._own[name]
        with torch.no_grad():
            for name in sorted(wanted):
                weight = _linear(self.base, name).weight
                if name not in self._own:
                    self._own[name] = torch.nn.Parameter(torch.empty_like(weight), False)
                    _linear(self.model, name).weight = self._own[name]
                a = tensors[f"{PREFIX}{name}.lora_A.weight"]
                b = tensors[f"{PREFIX}{name}.lora_B.weight"]
                self._own[name].copy_(torch.addmm(weight.to(a.dtype), b, a, alpha=scale))
