"""One batch of scored completions to new weights: what a step of GRPO does between two samplers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from xorl_lab.recipes import rollouts
from xorl_lab.types import ForwardBackwardOutput

if TYPE_CHECKING:
    from xorl_lab.client import TrainingClient
    from xorl_lab.recipes.grpo import GrpoSettings


def update(
    client: "TrainingClient",
    samples: Sequence[rollouts.Sample],
    settings: "GrpoSettings",
    warnings: list[str],
) -> dict[str, float]:
    """Update the weights on one batch.

    With TIS, ``logprobs`` are the trainer's own, as of the last train step, and
    ``rollout_logprobs`` the sampler's; without it ``logprobs`` are the sampler's throughout.
    """
    params = settings.loss()
    extras: list[dict[str, Sequence[float]]] = [{} for _ in samples]
    metrics: dict[str, float] = {}
    penalty = settings.needs("ref_logprobs")
    if penalty or settings.report_base_kl:
        data = [rollouts.datum(s, {}) for s in samples]
        temperature = {"logprob_temperature": settings.temperature}
        base = client.forward_base(data, loss_fn_params=temperature).result()
        reference = rollouts.completion_logprobs(base, samples)
        metrics |= rollouts.gap("kl_base", samples, reference)
        rollouts.note("ref_logprobs", samples, reference)
        if penalty:
            extras = [{"ref_logprobs": r} for r in reference]
    if tis := settings.needs("rollout_logprobs"):
        extras = [
            {**e, "rollout_logprobs": s.rollout.logprobs}
            for e, s in zip(extras, samples, strict=True)
        ]
        data = [rollouts.datum(s, e) for s, e in zip(samples, extras, strict=True)]
        output = client.forward(data, settings.loss_fn, params).result()
        extras = _last_step(extras, rollouts.completion_logprobs(output, samples))
    seen: list[dict[str, float]] = []
    terms = {"return_terms": list(rollouts.TERMS)}
    for round_ in range(settings.updates_per_batch):
        data = [rollouts.datum(s, e) for s, e in zip(samples, extras, strict=True)]
        forward = client.forward_backward(data, settings.loss_fn, params | terms)
        optimize = client.optim_step(settings.adam())  # queued behind it, so the two are one wait
        output, optimized = forward.result(), optimize.result()
        seen.append(output.metrics | optimized.metrics)
        warnings += _new(output, warnings)
        trainer = rollouts.completion_logprobs(output, samples)
        if round_ == 0:
            metrics |= rollouts.gap("kl_sampler", samples, trainer)
            rollouts.note("trainer_logprobs", samples, trainer)
        if tis:
            extras = _last_step(extras, trainer)
        if round_ == settings.updates_per_batch - 1:
            rollouts.note_terms(output, samples)
    return metrics | rollouts.over_updates(seen)


def _last_step(
    extras: Sequence[Mapping[str, Sequence[float]]], logprobs: Sequence[Sequence[float]]
) -> list[dict[str, Sequence[float]]]:
    """The inputs with the trainer's logprobs of the last train step as the old ones."""
    return [{**e, "logprobs": old} for e, old in zip(extras, logprobs, strict=True)]


def _new(output: ForwardBackwardOutput, known: Sequence[str]) -> list[str]:
    return [str(w) for w in output.info.get("warnings", ()) if str(w) not in known]
