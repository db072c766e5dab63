"""AdamW over named tensors, with float32 masters where the weights are coarser."""

import math
from collections.abc import Mapping

import torch

from xorl_lab.errors import CheckpointError, EngineError
from xorl_lab.types import AdamParams

Tensors = dict[str, torch.Tensor]


class Optimizer:
    """torch's AdamW; every field of AdamParams is set anew at each step.

    Weights coarser than float32 are updated through a float32 master copy, since steps smaller
    than their rounding would be lost.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self._adamw: torch.optim.AdamW | None = None
        self._masters: dict[str, torch.nn.Parameter] = {}

    def step(
        self, grads: Mapping[str, torch.Tensor], divisor: float, adam: AdamParams
    ) -> dict[str, float]:
        """Apply one update.

        Args:
            grads: by parameter name; sums over tokens.  A missing name counts as zero.
            divisor: the gradient is divided by this first.
            adam: settings of this step.

        Returns:
            ``grad_norm``: L2 norm of the divided gradient before clipping; ``grad_scale``: the
            factor that clipping applied to it (1 = none).

        Raises:
            EngineError: the gradient is not finite; nothing was changed.
        """
        with torch.no_grad():
            norms = [torch.linalg.vector_norm(g.to(_master_dtype(g))) for g in grads.values()]
            total = torch.stack(norms).cpu().double() if norms else torch.zeros(1)
            norm = float(torch.linalg.vector_norm(total)) / divisor
        if not math.isfinite(norm):
            raise EngineError(
                f"the gradient's norm is {norm}, so the step was refused and the weights are as "
                "they were: lower the learning rate, or look for extreme ratios and advantages"
            )
        scale = 1.0
        if adam.grad_clip_norm and norm > adam.grad_clip_norm:
            scale = adam.grad_clip_norm / norm
        self._apply(grads, scale / divisor, adam)
        return {"grad_norm": norm, "grad_scale": scale}

    def _apply(self, grads: Mapping[str, torch.Tensor], factor: float, adam: AdamParams) -> None:
        adamw = self._ready()
        for group in adamw.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        for name, master in self._masters.items():
            grad = grads.get(name)
            master.grad = (
                torch.zeros_like(master) if grad is None else grad.to(master.dtype) * factor
            )
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self.parameters[name]:
                    self.parameters[name].copy_(master)

    def state(self) -> Tensors:
        """Moments, step counts and masters, for a checkpoint.  Empty before the first step."""
        tensors: Tensors = {}
        if self._adamw is None:
            return tensors
        for name, master in self._masters.items():
            for key, value in self._adamw.state[master].items():
                # torch types the step count by the user's default dtype.
                tensors[f"{key}.{name}"] = value.float() if key == "step" else value
            if master is not self.parameters[name]:
                tensors[f"master.{name}"] = master.detach()
        return tensors

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned.

        Raises:
            CheckpointError: the tensors are not those of these parameters.
        """
        self.check_state(tensors)
        self.reset()
        if not tensors:
            return
        adamw = self._ready()
        with torch.no_grad():
            for name, master in self._masters.items():
                adamw.state[master] = {
                    key: tensors[f"{key}.{name}"]
                    .clone()
                    .to("cpu" if key == "step" and not adamw.defaults["fused"] else master.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
                if master is not self.parameters[name]:
                    master.copy_(tensors[f"master.{name}"])

    def check_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make sure that :meth:`load_state` will succeed.

        Raises:
            CheckpointError: the tensors are not those of these parameters.
        """
        expected = {
            f"{key}.{name}" for name in self.parameters for key in ("step", "exp_avg", "exp_avg_sq")
        }
        coarse = [n for n, p in self.parameters.items() if p.dtype != _master_dtype(p)]
        expected |= {f"master.{name}" for name in coarse}
        if tensors and expected != set(tensors):
            odd = sorted(expected ^ set(tensors))
            raise CheckpointError(
                "checkpoint.optimizer_mismatch",
                f"the optimizer state does not fit the model: {len(odd)} tensors are missing or "
                f"extra, e.g. {odd[0]}",
                {"tensors": odd},
            )

    def reset(self) -> None:
        """Forget moments and masters, as before the first step."""
        self._adamw = None
        self._masters = {}

    def _ready(self) -> torch.optim.AdamW:
        if self._adamw is None:
            self._masters = {n: _master(p) for n, p in self.parameters.items()}
            masters = list(self._masters.values())
            # None rather than False: False would also rule out what torch chooses elsewhere.
            fused = all(m.is_cuda for m in masters) or None
            self._adamw = torch.optim.AdamW(masters, fused=fused)
        return self._adamw


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    dtype = _master_dtype(parameter)
    return (
        parameter if parameter.dtype == dtype else torch.nn.Parameter(parameter.detach().to(dtype))
    )


def _master_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
