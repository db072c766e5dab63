"""Planted mistakes: each must be caught by an assertion of the oracle."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from tests.losses import oracle
from xorl_lab import losses

SOURCE = Path(losses.__file__).parent


@dataclass(frozen=True)
class Mutant:
    """One mistake: in ``file``, ``old`` (found exactly once) becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant("nll_sign", "supervised.py", "(-logprobs, inputs", "(logprobs, inputs"),
    Mutant("mean_for_sum", "reduction.py", "elementwise.sum()", "elementwise.mean()"),
    Mutant("weights_ignored", "reduction.py", "elementwise = weights *", "elementwise ="),
    Mutant(
        "weights_as_mask",
        "reduction.py",
        "elementwise = weights *",
        "elementwise = (weights != 0) *",
    ),
    Mutant("inverted_mask", "inputs.py", 'inputs["weights"] != 0', 'inputs["weights"] == 0'),
    Mutant("only_weight_one", "inputs.py", 'inputs["weights"] != 0', 'inputs["weights"] == 1'),
    Mutant(
        "mask_by_multiplication",
        "inputs.py",
        "return torch.where(trained, logprobs, 0.0), constants",
        "return trained * logprobs, constants",
    ),
    Mutant(
        "padding_of_constants_kept",
        "inputs.py",
        "torch.where(trained, inputs[key].detach().to(logprobs.dtype), 0.0)",
        "inputs[key].detach().to(logprobs.dtype)",
    ),
    Mutant(
        "shifted_by_one",
        "inputs.py",
        "inputs[key].detach()",
        '(inputs[key] if key == "weights" else inputs[key].roll(1, -1)).detach()',
    ),
    Mutant(
        "constants_as_integers",
        "inputs.py",
        "inputs[key].detach()",
        '(inputs[key].trunc() if key == "rollout_logprobs" else inputs[key]).detach()',
    ),
    Mutant(
        "importance_sampling_sign",
        "policy.py",
        'objective = -ratio * inputs["advantages"]',
        'objective = ratio * inputs["advantages"]',
    ),
    Mutant("ratio_inverted", "policy.py", "= logprobs - old_logprobs", "= old_logprobs - logprobs"),
    Mutant(
        "ratio_detached",
        "policy.py",
        "_bounded_exp(log_ratio)",
        "_bounded_exp(log_ratio.data) + 0 * logprobs",
    ),
    Mutant(
        "ratio_unbounded",
        "policy.py",
        "log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()",
        "log_ratio.exp()",
    ),
    Mutant(
        "reported_ratio_clipped", "policy.py", '"ratio": ratio,', '"ratio": ratio.clamp(0.8, 1.2),'
    ),
    Mutant("min_for_max", "policy.py", "torch.maximum(", "torch.minimum("),
    Mutant("missing_clip", "policy.py", "-ratio.clamp(low, high) *", "-ratio *"),
    Mutant(
        "only_clipped", "policy.py", "torch.maximum(-ratio * adv", "torch.maximum(-9 * ratio * adv"
    ),
    Mutant("clip_low_missing", "policy.py", "ratio.clamp(low, high)", "ratio.clamp(max=high)"),
    Mutant("clip_high_missing", "policy.py", "ratio.clamp(low, high)", "ratio.clamp(min=low)"),
    Mutant("eps_high_ignored", "policy.py", "1 + params.eps_clip_high", "1 + params.eps_clip"),
    Mutant("eps_low_is_high", "policy.py", "1 - params.eps_clip,", "1 - params.eps_clip_high,"),
    Mutant("flag_high_side", "policy.py", "(ratio > high) & (adv", "(ratio < high) & (adv"),
    Mutant(
        "flag_low_sign",
        "policy.py",
        "(ratio < low) & (advantages < 0)",
        "(ratio < low) & (advantages > 0)",
    ),
    Mutant("dual_clip_sign", "policy.py", "dual = (advantages < 0)", "dual = (advantages > 0)"),
    Mutant("dual_clip_missing", "policy.py", "return torch.where(dual, bound, obj", "return (obj"),
    Mutant("dual_clip_direction", "policy.py", "(objective > bound)", "(objective < bound)"),
    Mutant("dual_clip_not_flagged", "policy.py", "clipped | dual", "clipped"),
    Mutant(
        "tis_from_new_logprobs",
        "policy.py",
        '_truncated_weight(inputs["logprobs"], ',
        "_truncated_weight(logprobs.detach(), ",
    ),
    Mutant(
        "tis_missing_in_gradient",
        "policy.py",
        'objective = terms["tis_weight"] * objective',
        'objective = objective + ((terms["tis_weight"] - 1) * objective).detach()',
    ),
    Mutant(
        "tis_missing_in_value",
        "policy.py",
        'objective = terms["tis_weight"] * objective',
        'weighted = terms["tis_weight"] * objective\n'
        "        objective = weighted + (objective - weighted).detach()",
    ),
    Mutant(
        "tis_inverted",
        "policy.py",
        "old_logprobs - rollout_logprobs)",
        "rollout_logprobs - old_logprobs)",
    ),
    Mutant("tis_low_missing", "policy.py", "raw.clamp(low, high)", "raw.clamp(max=high)"),
    Mutant("tis_high_missing", "policy.py", "raw.clamp(low, high)", "raw.clamp(min=low)"),
    Mutant(
        "tis_flag_inverted",
        "policy.py",
        "(raw < low) | (raw > high)",
        "(raw >= low) & (raw <= high)",
    ),
    Mutant(
        "tis_on_penalty",
        "policy.py",
        "return objective + params.kl_coef * terms",
        'return objective + terms.get("tis_weight", 1.0) * params.kl_coef * terms',
    ),
    Mutant("tis_input_not_required", "policy.py", '("rollout_logprobs",) if', "() if"),
    Mutant("icepop_not_masking", "policy.py", "torch.where(masked, 0.0, objective)", "objective"),
    Mutant(
        "icepop_inverted",
        "policy.py",
        "torch.where(masked, 0.0, objective)",
        "torch.where(masked, objective, 0.0)",
    ),
    Mutant("icepop_one_sided", "policy.py", "(ratio < 1 / params.icepop_beta) | ", ""),
    Mutant("icepop_lower_bound", "policy.py", "ratio < 1 / params", "ratio < 1 - 1 / params"),
    Mutant(
        "icepop_in_value_only",
        "policy.py",
        "torch.where(masked, 0.0, objective)",
        "objective - (masked * objective).detach()",
    ),
    Mutant("penalty_sign", "policy.py", "objective + params.kl_coef", "objective - params.kl_coef"),
    Mutant("penalty_scaled_by_advantage", "policy.py", "+ params.kl_coef", "+ objective.detach()"),
    Mutant("penalty_in_value_only", "policy.py", '* terms["kl"]', '* terms["kl"].detach()'),
    Mutant("penalty_constant_type", "policy.py", '"], params.kl_type)', '"], "k3")'),
    Mutant("kl_direction", "kl.py", "(logprobs - ref_logprobs)", "(ref_logprobs - logprobs)"),
    Mutant("k2_not_halved", "kl.py", "d.square() / 2", "d.square()"),
    Mutant("k3_other_way", "kl.py", "torch.expm1(-d) + d", "torch.expm1(d) - d"),
    Mutant("k3_linear_sign", "kl.py", "torch.expm1(-d) + d", "torch.expm1(-d) - d"),
    Mutant("k3_constant", "kl.py", "torch.expm1(-d) + d", "torch.exp(-d) + d"),
    Mutant("k3_of_training", "kl.py", "torch.expm1(bounded) - b", "torch.expm1(-bounded) + b"),
    Mutant("k3_of_training_summed", "kl.py", "- bounded).mean()", "- bounded).sum()"),
    Mutant("mean_off_by_one", "metrics.py", "loss / valid if", "loss / (valid + 1) if"),
    Mutant(
        "icepop_off_denominator",
        "metrics.py",
        "int(trained.sum())",
        ('int((trained & ~terms.get("masked", ~trained).bool()).sum())'),
    ),
    Mutant(
        "zero_terms_not_counted",
        "metrics.py",
        "int(trained.sum())",
        ('int((terms["elementwise_loss"] != 0).sum())'),
    ),
    Mutant("weights_as_count", "metrics.py", "int(trained.sum())", "int(weights.sum())"),
    Mutant("min_is_max", "metrics.py", "values.min()", "values.max()"),
    Mutant("entropy_sign", "metrics.py", 'float(-values["old', 'float(values["old'),
    Mutant("stats_unconditional", "metrics.py", "if kl_stats:", "if True:"),
    Mutant("clipfrac_of_tis", "metrics.py", '"pg_clipfrac": "clipped"', '"pg_clipfrac": "ratio"'),
    Mutant("mean_of_nothing", "metrics.py", "if valid else 0.0", "if valid else float('nan')"),
    Mutant("std_unbiased", "advantages.py", "max(len(present), 1)", "max(len(present) - 1, 1)"),
    Mutant("variance_for_std", "advantages.py", "/ math.sqrt(max(", "** 2 / (max("),
    Mutant("rounding_noise", "advantages.py", " or _all_equal(present)", ""),
    Mutant(
        "failed_as_zero",
        "advantages.py",
        "    if reward is None:\n        return None\n",
        ("    reward = 0.0 if reward is None else reward\n"),
    ),
    Mutant("leave_none_out", "advantages.py", "scale = count / max(count - 1, 1)", "scale = 1.0"),
    Mutant(
        "leave_out_inverted", "advantages.py", "count / max(count - 1", "(count - 1) / max(count"
    ),
    Mutant("not_centred", "advantages.py", "value - mean for", "value for"),
)


@pytest.fixture
def loaded(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """Import a copy of the package, with the mutant of the test planted, under another name."""
    mutant: Mutant | None = request.param
    package = f"mutant_{mutant.name}" if mutant else "mutant_free"
    (tmp_path / package).mkdir()
    for path in SOURCE.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if mutant and path.name == mutant.file:
            assert text.count(mutant.old) == 1, f"{mutant.old!r} must occur once in {path.name}"
            text = text.replace(mutant.old, mutant.new)
        text = text.replace("xorl_lab.losses", package)
        (tmp_path / package / path.name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(package)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


@pytest.mark.parametrize("loaded", [None], ids=["unchanged"], indirect=True)
def test_unchanged_copy_passes(loaded: ModuleType) -> None:
    oracle.check_all(loaded)


@pytest.mark.parametrize("loaded", MUTANTS, ids=lambda mutant: mutant.name, indirect=True)
def test_mutant_is_caught(loaded: ModuleType) -> None:
    with pytest.raises(AssertionError):
        oracle.check_all(loaded)


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
