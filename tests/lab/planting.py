"""Runs in which one thing is wrong, really computed, recorded as any loop of one's own is."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel

import xorl_lab as xl
from xorl_lab.checkpoints import Address
from xorl_lab.engine import engine, tiny
from xorl_lab.lab import Lab, Run
from xorl_lab.lab.diagnosis.candidates import Shelf
from xorl_lab.lab.diagnosis.diagnose import Question, diagnose
from xorl_lab.lab.diagnosis.result import Diagnosis
from xorl_lab.types import Group, Rollout

BOS, EOS = 256, 257
TEXTS = ["one", "two, or three", "a much longer beginning of a text"]
LENGTH = 12
EACH = 4


@dataclass
class Plan:
    """How a loop draws and judges; by default as is right."""

    seed: int = 0
    temperature: float = 1.0
    """That the record names."""
    prompts: Callable[["Loop"], list[list[int]]] | None = None
    """Ids that are recorded; None = the texts, encoded."""
    draw: "Callable[[Loop, list[int], int], list[tuple[list[int], list[float]]]] | None" = None
    """(loop, prompt, seed) -> tokens and the sampler's logprobs; None = the embedded sampler."""
    judge: "Callable[[Loop, list[Group]], list[list[float]]] | None" = None
    """The trainer's logprobs; None = those of the update itself."""
    adapter: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    rate: float = 2e-2
    save_every: int = 1


@dataclass
class Loop:
    """What a plan can reach while it draws and judges."""

    lab: Lab
    client: xl.TrainingClient
    plan: Plan
    folder: Path
    step: int = 0
    samplers: list[xl.SamplingClient] = field(default_factory=list)
    """Of each step so far, the present one last."""
    networks: dict[int, torch.nn.Module] = field(default_factory=dict)
    """Those asked for, by step."""

    @property
    def tokenizer(self):
        return self.client.get_tokenizer()

    def saved(self) -> str:
        """Address of the present weights."""
        return self.client.save_state(f"now-{self.step}", overwrite=True).result().path

    def network(self) -> torch.nn.Module:
        """The present weights as transformers and peft have them, without any of our code."""
        if self.step not in self.networks:
            path = self.client.save_weights_for_sampler(f"peft-{self.step}").result().path
            folder = Address.parse(path).folder(self.lab.service.root)
            with warnings.catch_warnings():  # peft reads an attribute that transformers gives up
                warnings.simplefilter("ignore", FutureWarning)
                network = PeftModel.from_pretrained(tiny.dense(torch.float32), folder)
            self.networks[self.step] = network.eval()
        return self.networks[self.step]


def sampled(
    client: xl.SamplingClient,
    prompt: Sequence[int],
    seed: int,
    **params: Any,  # noqa: ANN401
) -> list[tuple[list[int], list[float]]]:
    """Completions with the sampler's own logprobs."""
    chosen = xl.SamplingParams(max_tokens=LENGTH, seed=seed, **params)
    answer = client.sample(xl.ModelInput.from_ints(prompt), chosen, num_samples=EACH).result()
    return [(s.tokens, s.logprobs) for s in answer.sequences]


def datum(prompt: Sequence[int], rollout: Rollout) -> xl.Datum:
    count, before = len(rollout.tokens), len(prompt) - 1
    inputs = {
        "target_tokens": [*prompt[1:], *rollout.tokens],
        "weights": [0.0] * before + [1.0] * count,
        "logprobs": [0.0] * before + list(rollout.logprobs),
        "advantages": [0.0] * before + [rollout.advantage] * count,
    }
    return xl.Datum(xl.ModelInput.from_ints([*prompt, *rollout.tokens][:-1]), inputs)


def planted(lab: Lab, name: str, plan: Plan) -> Run:
    """A recorded run of some steps."""
    shape = {"rank": 4, "seed": plan.seed, **plan.adapter}
    client = lab.service.create_lora_training_client(lab.model, model_id=name, **shape)
    loop = Loop(lab, client, plan, lab.folder)
    settings = {"temperature": plan.temperature}
    with lab.track(name, client, settings=settings, save_every=plan.save_every) as run:
        for step in run.steps(plan.steps):
            loop.step = step
            loop.samplers.append(client.save_weights_and_get_sampling_client())
            groups = _groups(loop)
            data = [datum(g.prompt_tokens, r) for g in groups for r in g.rollouts]
            params = {"logprob_temperature": plan.temperature}
            judged = plan.judge(loop, groups) if plan.judge else None
            output = client.forward_backward(data, "policy_loss", params).result()
            client.optim_step({"learning_rate": plan.rate}).result()
            rollouts = [r for g in groups for r in g.rollouts]
            for i, (rollout, out) in enumerate(zip(rollouts, output.loss_fn_outputs, strict=True)):
                own = [float(x) for x in out.logprobs.data[-len(rollout.tokens) :]]
                rollout.streams["trainer_logprobs"] = own if judged is None else judged[i]
            run.log({"reward": 0.0}, rollouts=groups)
    return lab.run(name)


def _groups(loop: Loop) -> list[Group]:
    plan = loop.plan
    found: list[Group] = []
    encoded = plan.prompts(loop) if plan.prompts else [list(t.encode()) for t in TEXTS]
    for index, prompt in enumerate(encoded):
        seed = 1000 * plan.seed + 10 * loop.step + index
        if plan.draw is None:
            drawn = sampled(loop.samplers[-1], prompt, seed, temperature=plan.temperature)
        else:
            drawn = plan.draw(loop, prompt, seed)
        rollouts = [
            Rollout(
                tokens=tokens,
                logprobs=logprobs,
                text=loop.tokenizer.decode(tokens),
                stop_reason="length",
                version=loop.client.version,
                reward=1.0,
                advantage=1.0 if sum(tokens) % 2 else -1.0,
            )
            for tokens, logprobs in drawn
        ]
        found.append(Group(loop.tokenizer.decode(prompt), prompt, rollouts))
    return found


def forward(
    network: torch.nn.Module,
    prompt: Sequence[int],
    tokens: Sequence[int],
    positions: Sequence[int] | None = None,
) -> list[float]:
    """Logprobs of a completion by a plain forward pass at given positions."""
    table = distributions(network, prompt, tokens, positions)
    return [float(row[t]) for row, t in zip(table, tokens, strict=True)]


def distributions(
    network: torch.nn.Module,
    prompt: Sequence[int],
    tokens: Sequence[int],
    positions: Sequence[int] | None = None,
) -> torch.Tensor:
    """(C, V) logprobs of whatever might have stood in the place of each token."""
    ids = torch.tensor([[*prompt, *tokens]])
    where = None if positions is None else torch.tensor([list(positions)])
    with torch.no_grad():
        logits = network(input_ids=ids, position_ids=where).logits[0].double()
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]


def examined(lab, run, *, client=None, progress=lambda *_: None, dtype="float32", **question):
    """The diagnosis of a run, as ``Run.diagnose`` makes it."""
    reader = lab.run(run).reader if isinstance(run, str) else run.reader
    shelf = shelf_of(lab, reader)
    held = partial(engine.get, reader.info.model, "cpu", dtype)
    return diagnose(reader, Question(**question), shelf, held, client=client, progress=progress)


def shelf_of(lab, reader):
    return Shelf(lab.service.root, lab._store, lab._weights, reader.info)


def diagnosed_without_weights(run):
    return diagnose(run.reader, Question(), None, lambda: None)


def row(found: Diagnosis, hypothesis: str) -> Any:  # noqa: ANN401
    return next(e for e in found.evidence if e.hypothesis == hypothesis)


def spread(values: Sequence[float]) -> float:
    return float(np.abs(values).mean())
