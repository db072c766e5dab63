"""Planted mistakes: each must be caught by an assertion of the oracle."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tests.losses import oracle
from xorl_lab import losses

SOURCE = Path(losses.__file__).parent
PACKAGE = "mutant_losses"


@dataclass(frozen=True)
class Mutant:
    """One mistake: in ``file``, ``old`` (found exactly once) becomes ``new``."""

    name: str
    file: str
    old: str
    new: str


NEGATED = '-inputs["advantages"], low, high)\n    return'
LOW_DEFAULT = "clip_low_threshold: float = 0.9"
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
    Mutant("ratio_inverted", "ratio.py", "= logprobs - old_logprobs", "= old_logprobs - logprobs"),
    Mutant(
        "ratio_detached",
        "ratio.py",
        "= bounded_exp(log_ratio)",
        "= bounded_exp(log_ratio.data) + 0 * logprobs",
    ),
    Mutant(
        "ratio_unbounded",
        "ratio.py",
        "log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()",
        "log_ratio.exp()",
    ),
    Mutant(
        "reported_ratio_clipped", "ratio.py", '"ratio": ratio,', '"ratio": ratio.clamp(0.8, 1.2),'
    ),
    Mutant("min_for_max", "ratio.py", "torch.maximum(", "torch.minimum("),
    Mutant("missing_clip", "ratio.py", "-ratio.clamp(low, high) *", "-ratio *"),
    Mutant(
        "only_clipped", "ratio.py", "torch.maximum(-ratio * adv", "torch.maximum(-9 * ratio * adv"
    ),
    Mutant("clip_low_missing", "ratio.py", "ratio.clamp(low, high)", "ratio.clamp(max=high)"),
    Mutant("clip_high_missing", "ratio.py", "ratio.clamp(low, high)", "ratio.clamp(min=low)"),
    Mutant("eps_high_ignored", "policy.py", "1 + params.eps_clip_high", "1 + params.eps_clip"),
    Mutant("eps_low_is_high", "policy.py", "1 - params.eps_clip,", "1 - params.eps_clip_high,"),
    Mutant("flag_high_side", "ratio.py", "(ratio > high) & (adv", "(ratio < high) & (adv"),
    Mutant(
        "flag_low_sign",
        "ratio.py",
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
        "ratio.py",
        "return objective + coefficient * terms",
        'return objective + terms.get("tis_weight", 1.0) * coefficient * terms',
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
    Mutant("penalty_sign", "ratio.py", "return objective + coeff", "return objective - coeff"),
    Mutant(
        "penalty_scaled_by_advantage",
        "ratio.py",
        "return objective + coefficient",
        "return objective + objective.detach()",
    ),
    Mutant("penalty_in_value_only", "ratio.py", '* terms["kl"]', '* terms["kl"].detach()'),
    Mutant("penalty_constant_type", "ratio.py", '"], kl_type)', '"], "k3")'),
    Mutant("ppo_sign", "clipped.py", 'inputs["advantages"], low, high)\n    return', NEGATED),
    Mutant("ppo_low_as_distance", "clipped.py", "= params.clip_low_t", "= 1 - params.clip_low_t"),
    Mutant(
        "ppo_sides_swapped",
        "clipped.py",
        "params.clip_low_threshold, params.clip_high_threshold",
        "params.clip_high_threshold, params.clip_low_threshold",
    ),
    Mutant(
        "ppo_high_mirrors_low",
        "clipped.py",
        "threshold, params.clip_high_threshold",
        "threshold, 2 - params.clip_low_threshold",
    ),
    Mutant("ppo_default_low", "clipped.py", "clip_low_threshold: float = 0.8", LOW_DEFAULT),
    Mutant(
        "drgrpo_sign",
        "clipped.py",
        'inputs["advantages"], low, high)\n    objective',
        '-inputs["advantages"], low, high)\n    objective',
    ),
    Mutant("drgrpo_low_side", "clipped.py", "1 - params.clip_low,", "1 - params.clip_high,"),
    Mutant("drgrpo_high_side", "clipped.py", "1 + params.clip_high\n", "1 + params.clip_low\n"),
    Mutant(
        "drgrpo_default_high", "clipped.py", "clip_high: float = 0.28", "clip_high: float = 0.2"
    ),
    Mutant("drgrpo_beta_ignored", "clipped.py", "params.beta, params.kl", "0.0, params.kl"),
    Mutant(
        "drgrpo_beta_halved", "clipped.py", "params.beta, params.kl", "params.beta / 2, params.kl"
    ),
    Mutant("drgrpo_constant_type", "clipped.py", "beta, params.kl_type", 'beta, "k3"'),
    Mutant("drgrpo_input_not_required", "clipped.py", '("ref_logprobs",) if', "() if"),
    Mutant("drgrpo_input_always_required", "clipped.py", "if self.beta > 0", "if self.beta >= 0"),
    Mutant("cispo_sign", "offpolicy.py", "objective = -weight", "objective = weight"),
    Mutant("cispo_weight_not_constant", "offpolicy.py", "ratio.detach().clamp", "ratio.clamp"),
    Mutant(
        "cispo_token_dropped", "offpolicy.py", "* logprobs\n", "* ratio.clamp(low, high).log()\n"
    ),
    Mutant("cispo_unclipped", "offpolicy.py", ".clamp(low, high)\n", ".clamp(0)\n"),
    Mutant("cispo_low_missing", "offpolicy.py", ".clamp(low, high)\n", ".clamp(max=high)\n"),
    Mutant("cispo_high_missing", "offpolicy.py", ".clamp(low, high)\n", ".clamp(min=low)\n"),
    Mutant("cispo_all_constant", "offpolicy.py", "* logprobs\n", "* (ratio - ratio.detach())\n"),
    Mutant("cispo_flag_side", "offpolicy.py", "(ratio < low) | (ratio > high)", "(ratio < low)"),
    Mutant("cispo_flag_without_advantage", "offpolicy.py", ' & (inputs["advantages"] != 0)', ""),
    Mutant("cispo_default_high", "offpolicy.py", "float = 4.0", "float = 1.2"),
    Mutant("dro_sign", "offpolicy.py", "pull - logprobs *", "pull + logprobs *"),
    Mutant("dro_pull_sign", "offpolicy.py", "= pull - logprobs", "= -pull - logprobs"),
    Mutant("dro_beta_not_halved", "offpolicy.py", "params.beta / 2", "params.beta"),
    Mutant("dro_beta_ignored", "offpolicy.py", "params.beta / 2", "0.05 / 2"),
    Mutant("dro_not_squared", "offpolicy.py", '"log_ratio"].square()', '"log_ratio"].abs()'),
    Mutant("dro_pull_in_value_only", "offpolicy.py", ".square()", ".square().detach()"),
    Mutant("dro_through_ratio", "offpolicy.py", "- logprobs * inputs", '- terms["ratio"] * inputs'),
    Mutant("dro_default_beta", "offpolicy.py", "float = 0.05", "float = 0.1"),
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


class Copy(MetaPathFinder, InspectLoader):
    """Imports the package under another name, with one mutant planted, without touching a file."""

    def __init__(self, mutant: Mutant | None) -> None:
        self.sources = {path.stem: path.read_text(encoding="utf-8") for path in SOURCE.glob("*.py")}
        if mutant:
            module = mutant.file.removesuffix(".py")
            found = self.sources[module].count(mutant.old)
            assert found == 1, f"{mutant.old!r} must occur once in {mutant.file}, not {found} times"
            self.sources[module] = self.sources[module].replace(mutant.old, mutant.new)

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname.split(".")[0] == PACKAGE else None

    def is_package(self, fullname: str) -> bool:
        return fullname == PACKAGE

    def get_source(self, fullname: str) -> str:
        source = self.sources[fullname.partition(".")[2] or "__init__"]
        return source.replace("xorl_lab.losses", PACKAGE)

    def get_code(self, fullname: str) -> CodeType:
        return compiled(fullname, self.get_source(fullname))


@cache
def compiled(name: str, source: str) -> CodeType:
    """All mutants share the modules that they leave alone."""
    return compile(source, f"<{name}>", "exec")


@pytest.fixture
def loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package with the mutant of the test planted, or an unchanged copy."""
    monkeypatch.setattr(sys, "meta_path", [Copy(request.param), *sys.meta_path])
    yield importlib.import_module(PACKAGE)
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
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
