"""The maths of the benchmark's tables, on numbers that are known."""

import doctest
import math

import pytest

from benchmarks import channel, counting, goals, summary, workload
from benchmarks.channel import Sample
from benchmarks.counting import Sizes, Work, grpo_work
from benchmarks.results import Line, Results, Row
from benchmarks.summary import Agreement, Comparison, Memory, Spread, peak, short
from benchmarks.table import markdown


def sample(seconds: float, tokens: int = 10, peak: int | None = 100, **extra: object) -> Sample:
    return Sample(seconds, 2 * seconds, tokens, peak, extra)


def step(seconds: float, without_signal: int) -> Sample:
    phases = {"sample": 0.5 * seconds, "train": 0.25 * seconds}
    extra = {"without_signal": without_signal, "prompt_tokens": 7, "phases": phases}
    return sample(seconds, **extra)


def row(case: str = "grpo", **changes) -> Row:
    values = {
        "case": case,
        "shape": "a | b",
        "dtype": "float32",
        "ours": [step(1.0, 1), step(2.0, 0)],
        "peer": [step(5.0, 0), step(5.0, 0)],
        "resident": (40, 50),
        "judged": ((case, "float32"),),
    }
    return Row(**(values | changes))


def test_ratios_are_of_medians_and_of_rounds():
    ours = [sample(1.0), sample(2.0), sample(4.0)]
    peer = [sample(3.0), sample(8.0), sample(4.0)]
    found = Comparison.of(ours, peer)
    assert found.ratio == found.busy == 2.0
    assert (found.by_round.low, found.by_round.high) == (1.0, 4.0)


def test_unequal_numbers_of_tokens_are_evened_out():
    found = Comparison.of([sample(1.0, 5)], [sample(3.0, 10)])
    assert found.ratio == 3.0
    assert found.per_token == pytest.approx(1.5)
    assert found.judged == found.per_token


def test_memory_is_ours_in_the_peers():
    found = Memory(ours=50, peer=100, ours_growth=10, peer_growth=40)
    assert (found.ratio, found.growth_ratio) == (0.5, 0.25)
    assert peak([sample(1.0, peak=3), sample(1.0, peak=7), sample(1.0, peak=None)]) == 7
    assert peak([sample(1.0, peak=None)]) is None


def test_agreement_uses_the_noise_of_both_sides():
    found = Agreement.of([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert found.error == pytest.approx(math.sqrt(2 / 3))
    assert found.holds
    assert not Agreement.of([1.0, 1.1], [2.0, 2.1]).holds


def test_short_keeps_three_digits():
    assert [short(v) for v in (0, 1234.5, 5.0, 0.0456, -2.5)] == [
        "0",
        "1234",
        "5.00",
        "0.0456",
        "-2.50",
    ]
    assert str(Spread.of([1.0])) == "1.00 [1.00..1.00]"


def test_bounds_count_as_met():
    assert goals.MEMORY.verdict(0.4) == "floor 0.6 met, goal 0.4 met"
    assert goals.SPEED["grpo", "float32"].verdict(1.99) == "floor 2 not met, goal 3 not met"


def test_work_is_counted_in_distinct_tokens():
    prompts = [[1, 2], [1, 3]]
    groups = [[[4, 5, 6], [4, 7]], [[8], [8]]]
    # Trained are 1 2 4 5, 1 2 4, 1 3 (the last token of each is a target only); all but the 1s are
    # followed by something that is trained.
    assert grpo_work(prompts, groups) == Work(
        prompts=3, sampled=3, drawn_from=5, trained=5, targets=4, steps=3
    )


def test_operations_follow_the_formula():
    sizes = Sizes(layers=100, head=10)
    work = Work(prompts=3, sampled=3, drawn_from=5, trained=5, targets=4, steps=3)
    assert sizes.sampling(work) == 2 * 100 * 6 + 2 * 10 * 5
    assert sizes.training(work) == 2 * (2 * 100 * 5 + 2 * 10 * 4)
    assert sizes.read(3) == 3 * 4 * 110


def test_sizes_are_those_of_the_model(tmp_path):
    torch = pytest.importorskip("torch")
    from xorl_lab.engine import adapters, tiny

    model = tiny.dense(torch.float32)
    model.config.save_pretrained(tmp_path)
    names = adapters.linear_layers(model)
    linear = [n for part in ("attn", "mlp") for n in names[part]]
    layers = sum(model.get_submodule(n).weight.numel() for n in linear)
    assert Sizes.of(tmp_path) == Sizes(layers, model.get_output_embeddings().weight.numel())


def test_prompts_have_the_length_asked_for():
    from xorl_lab.engine import tiny

    tokenizer = tiny.byte_tokenizer()
    texts = workload.prompts(tokenizer, 200)
    lengths = [len(tokenizer.encode(t, add_special_tokens=False)) for t in texts]
    assert len(set(texts)) == len(workload.TOPICS)
    assert min(lengths) >= 200
    assert max(lengths) < 240
    assert texts == workload.prompts(tokenizer, 200)


def test_rewards_tie_only_for_equal_texts():
    texts = [f"one sentence, number {n}" for n in range(8)]
    assert len({workload.untied(t) for t in texts}) == 8
    assert workload.without_signal([workload.untied(t) for t in texts + texts[:1] * 8], 8) == 1
    assert workload.happy("Happy joy") == pytest.approx(2 / 3)


def test_the_table_shows_ratios_goals_and_notes():
    text = markdown(Results({"date": "today"}, {}, [row()], [Line("limits", "x", "1 GB/s")]))
    assert "**3.33**" in text
    assert "float32: floor 2 met, goal 3 met" in text
    assert "groups without signal 1 / 0" in text
    assert "ours: sample 0.750 s, train 0.375 s" in text
    assert "a \\| b" in text
    assert "floor 0.6 not met, goal 0.4 not met" in text
    assert "2 operations per weight" in text


def test_results_survive_saving_and_later_runs_count(tmp_path):
    one = Results({"date": "1"}, {}, [row(), row("sampling")], [Line("start", "x", "1")])
    one.save(tmp_path / "results" / "one.json")
    assert Results.load(tmp_path / "results" / "one.json") == one
    two = Results({"date": "2"}, {}, [row(note="later")])
    merged = Results.merge([one, two])
    assert [(r.case, r.note) for r in merged.rows] == [("sampling", ""), ("grpo", "later")]
    assert merged.lines == one.lines


@pytest.mark.parametrize("module", [channel, counting, goals, summary, workload])
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


def test_the_peers_get_the_versions_that_ours_has(root):
    lines = {}
    for name in ("constraints.txt", "benchmarks/requirements.txt"):
        pins = [line for line in (root / name).read_text().splitlines() if "==" in line]
        lines[name] = dict(pin.split("==") for pin in pins)
    ours, peers = lines.values()
    assert set(peers) - set(ours) == {"trl"}
    assert all(ours[name] == peers[name] for name in peers.keys() & ours)
