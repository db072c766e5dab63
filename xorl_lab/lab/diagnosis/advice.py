"""What a cause means, and what to do about it, in sentences."""

from collections.abc import Mapping, Sequence

from xorl_lab.lab.diagnosis import causes
from xorl_lab.lab.diagnosis.recorded import Gap, Step
from xorl_lab.lab.diagnosis.result import nats, percent
from xorl_lab.lab.diagnosis.verdict import Outcome

MEANING: Mapping[str, str] = {
    causes.TEMPERATURE: "The {side}'s numbers are those of temperature {value}, while the run says "
    "{temperature:.4g}: let the sampler's temperature and the loss's logprob_temperature be one.",
    causes.TOP_P: "The {side}'s numbers are those of distributions cut to top-p {value} and "
    "scaled up again: report logprobs over the whole vocabulary, or draw with top_p=1.",
    causes.TOP_K: "The {side}'s numbers are those of distributions cut to the {value} most likely "
    "tokens and scaled up again: report logprobs over the whole vocabulary, or draw with top_k=-1.",
    causes.STALE: "The {side}'s numbers are those of other weights of this run, {value}: send the "
    "weights to the sampler after each update, or correct for the delay (use_tis).",
    causes.ADAPTER: "The {side}'s numbers are those of other weights ({value}): look at which "
    "adapter is loaded there, and under which name.",
    causes.TEMPLATE: "The {side}'s numbers are those of another prompt ({value}): send the token "
    "ids that are recorded, and never text that is encoded once more.",
    causes.POSITION: "The {side}'s numbers are those of other position ids ({value}): count "
    "positions from the first token of the text, not from its padding.",
    causes.SHAPE: "The {side}'s numbers depend on what a text is computed with ({value}): hide "
    "padding from the attention, and look for layers that mix the rows of a batch.",
    causes.DTYPE: "The {side}'s numbers are those of {value}: its rounding makes the difference, "
    "which up to 0.08 nats in the mean is as it must be. Compute in float32, or correct for it "
    "(use_tis); pass sampler_dtype={value!r} if it is meant to be so.",
    causes.DROPOUT: "The {side}'s numbers are random, as with {value}: train with dropout=0, or "
    "evaluate the old logprobs with it off.",
}
"""By cause, with the side, the value found and the run's temperature."""


def healthy(step: Step, gap: Gap, bar: float, *, again: bool) -> str:
    """Trainer and sampler agree."""
    trainer = "evaluated again, since the trainer's were not recorded" if again else "recorded"
    return (
        f"at step {step.number} the logprobs of trainer and sampler differ by {nats(gap.mean)} "
        f"nats in the mean of {_tokens(gap)} ({trainer}), within the {bar:g} that rounding may "
        "make: there is nothing to do."
    )


def explained(found: Sequence[Outcome], step: Step, gap: Gap, temperature: float) -> str:
    """One side, or both, are explained; by several causes alike perhaps.

    Args:
        found: of each side those that explain it, the best first.
        step: that was looked at.
        gap: of the recorded numbers.
        temperature: of the run.
    """
    parts = [_gap(step, gap)]
    for side in dict.fromkeys(o.side for o in found):
        rivals = [o for o in found if o.side == side]
        for i, each in enumerate(rivals):
            meaning = MEANING[each.cause].format(
                side=each.side, value=each.value, temperature=temperature
            )
            left = (
                ""
                if each.note
                else (
                    f" That explains {percent(each.share)}, and leaves {nats(each.left.mean)} nats."
                )
            )
            parts.append(("Or, which fits as well: " if i else "") + meaning + left)
    return " ".join(parts)


def unexplained(
    outcomes: Sequence[Outcome], sides: Sequence[str], step: Step, gap: Gap, weights: str
) -> str:
    """Nothing accounts for the gap.

    Args:
        outcomes: the best of each cause.
        sides: whose numbers are not those of the weights.
        step: that was looked at.
        gap: of the recorded numbers.
        weights: that drew the step, as far as is known.
    """
    near = max(outcomes, key=lambda o: o.share if o.share == o.share else -1.0, default=None)
    text = (
        f"{_gap(step, gap)} None of the hypotheses accounts for it: the numbers of the "
        f"{' and of the '.join(sides)} are not those of the weights {weights}"
    )
    if near is not None and near.share > 0.1:
        text += (
            f"; what comes nearest is {near.cause} ({near.value}), which explains "
            f"{percent(near.share)} and leaves {nats(near.left.mean)} nats"
        )
    toward = max(outcomes, key=lambda o: o.toward, default=None)
    if toward is not None and toward.toward >= 0.5:
        text += (
            f"; the gap points toward {toward.cause} ({toward.value}), with a correlation of "
            f"{toward.toward:.2f}: weights beyond it or between may not have been saved"
        )
    return (
        f"{text}. Look at another step (step=…), save more often (save_every=1), or compare the "
        "sampler's numbers with those of an embedded one."
    )


def few(step: Step, gap: Gap, outcomes: Sequence[Outcome]) -> str:
    """Too few tokens."""
    alike = ", ".join(f"{o.cause} ({o.value}) leaves {nats(o.left.mean)}" for o in outcomes)
    tried = f" Of what was tried, {alike} nats." if alike else ""
    return f"{_gap(step, gap)} These are too few to tell causes apart.{tried}"


def no_weights(step: Step, gap: Gap, before: int, *, on_server: bool) -> str:
    """The gap is known at most, and nothing can be evaluated."""
    where = "a server keeps the weights"
    if not on_server:
        where = f"the weights behind step {before}, which drew it, are not at hand"
    if not gap.tokens:
        return (
            f"step {step.number} has the sampler's logprobs alone, and {where}: record the "
            "trainer's as the stream trainer_logprobs, or save with save_every=1."
        )
    return (
        f"{_gap(step, gap)} What makes it cannot be found out, since {where}: save with "
        "save_every=1, or pass a step that follows a checkpoint."
    )


def _gap(step: Step, gap: Gap) -> str:
    if not gap.tokens:
        return f"At step {step.number} the trainer's logprobs were not recorded."
    return (
        f"At step {step.number} the logprobs of trainer and sampler differ by {nats(gap.mean)} "
        f"nats in the mean and {nats(gap.max)} at most, over {_tokens(gap)}."
    )


def _tokens(gap: Gap) -> str:
    return f"{gap.tokens} token{'s' if gap.tokens != 1 else ''}"
