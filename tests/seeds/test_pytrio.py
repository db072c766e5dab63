"""Every example of pytrio's TrainingClient page, cut from the page, runs in this process."""

import asyncio
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import xorl_lab as xl
from tests.seeds import cut
from xorl_lab.client import SamplingClient

SYNC = [
    "forward",
    "forward_backward",
    "forward_backward_custom",
    "optim_step",
    "save_state",
    "load_state",
    "load_state_with_optimizer",
    "save_weights_for_sampler",
    "create_sampling_client",
    "save_weights_and_get_sampling_client",
    "get_tokenizer",
]
ASYNC = [f"{name}_async" for name in SYNC if name != "get_tokenizer"]
OTHER_HEADINGS = ["Checkpoint Name Rules", "Async Methods"]


def section(page: Path, heading: str) -> str:
    """The code of the example in the section of one method."""
    lines = page.read_text(encoding="utf-8").splitlines()
    headings = {*SYNC, *ASYNC, *OTHER_HEADINGS}
    begin = lines.index(heading) + 1
    end = next((i for i in range(begin, len(lines)) if lines[i] in headings), len(lines))
    body = lines[begin:end]
    begins = re.compile(r"Example" if heading in SYNC else r"(\w+ = )?await .*")
    first = next(i for i, line in enumerate(body) if begins.fullmatch(line))
    return "\n".join(body[first + (heading in SYNC) :]).strip() + "\n"


class Desk:
    """What the examples take for granted: a client that has trained once, data, a checkpoint."""

    def __init__(self, home: Path) -> None:
        self.service = xl.ServiceClient(home=home)
        self.client = self.service.create_lora_training_client("tiny", 4, seed=1)
        tokens = self.client.get_tokenizer().encode("The meaning of life is")
        self.data = [xl.Datum(xl.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
        self.step()
        self.checkpoint = self.client.save_state("for-loading").result(60).path
        self.weights = self.client.save_weights_for_sampler("for-sampling").result(60).path
        self.client.forward_backward(self.data).result(60)

    def step(self) -> None:
        self.client.forward_backward(self.data).result(60)
        self.client.optim_step(xl.AdamParams(learning_rate=1e-2)).result(60)

    def run(self, page: Path, heading: str) -> dict[str, object]:
        """Run the example of a method; the names that it leaves behind."""
        code = section(page, heading)
        table = [('"/path/to/weights"', repr(self.weights))] if "/path/to" in code else []
        code = cut.change(code, table, heading)
        client = self.client
        if heading.startswith("load_state"):
            client = self.service.create_lora_training_client("tiny", 4, model_id="fresh", seed=1)
        if "custom" in heading:
            client = self.service.create_lora_training_client("tiny", 4, model_id="custom", seed=1)
        self.used = client

        def my_loss(data, logprobs):  # as the page's own example has it, for the async section
            loss = -sum(lp.mean() for lp in logprobs)
            return loss, {"my_loss": loss.item()}

        names: dict[str, object] = {
            "training_client": client,
            "data": self.data,
            "AdamParams": xl.AdamParams,
            "checkpoint_uri": self.checkpoint,
            "my_loss": my_loss,
        }
        if not heading.endswith("_async"):
            return cut.run(code, names)
        wrapped = f"async def main():\n{textwrap.indent(code, '    ')}    return dict(locals())\n"
        main = cut.run(wrapped, names)["main"]
        return {**names, **asyncio.run(main())}


@pytest.fixture
def desk(tmp_path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def page(documents) -> Path:
    return documents / "pytrio-training-client.txt"


def output_is_of_one_datum(desk: Desk, names: dict[str, object]) -> None:
    output = names["output"]
    assert len(output.loss_fn_outputs) == 1
    assert output.metrics["valid_tokens"] == desk.data[0].model_input.length


def custom_metric_is_reported(desk: Desk, names: dict[str, object]) -> None:
    output_is_of_one_datum(desk, names)
    assert names["output"].metrics["my_loss"] == names["output"].metrics["loss:sum"]
    assert desk.used.optim_step(xl.AdamParams()).result(60).metrics["grad_norm"] > 0


def step_was_taken(desk: Desk, names: dict[str, object]) -> None:
    assert desk.client.forward(desk.data).result(60).metrics["valid_tokens"] > 0
    assert desk.client.version == 2


def weights_were_loaded(desk: Desk, names: dict[str, object]) -> None:
    assert names["future"].result(60) == {}
    loaded, saved = (
        desk.used.forward(desk.data).result(60),
        desk.client.forward(desk.data).result(60),
    )
    assert loaded.loss_fn_outputs[0].logprobs.data == saved.loss_fn_outputs[0].logprobs.data


def state_was_saved(desk: Desk, names: dict[str, object]) -> None:
    assert names["result"].path == "xorl://default/weights/step-100"
    assert names["result"].model == "default"


def sampler_weights_were_saved(desk: Desk, names: dict[str, object]) -> None:
    assert names["result"].path == "xorl://default/sampler_weights/step-100"
    assert names["result"].size > 0


def sampler_answers(desk: Desk, names: dict[str, object]) -> None:
    sampler = names["sampling_client"]
    assert isinstance(sampler, SamplingClient)
    answer = sampler.sample("The", xl.SamplingParams(max_tokens=3, seed=1)).result(60)
    assert answer.meta_info["weight_version"] == 1
    assert len(answer.tokens) == len(answer.logprobs) >= 1


def text_became_tokens(desk: Desk, names: dict[str, object]) -> None:
    assert names["tokenizer"].decode(names["tokens"]) == "The meaning of life is"


CHECKS: dict[str, Callable[[Desk, dict[str, object]], None]] = {
    "forward": output_is_of_one_datum,
    "forward_backward": output_is_of_one_datum,
    "forward_backward_custom": custom_metric_is_reported,
    "optim_step": step_was_taken,
    "save_state": state_was_saved,
    "load_state": weights_were_loaded,
    "load_state_with_optimizer": weights_were_loaded,
    "save_weights_for_sampler": sampler_weights_were_saved,
    "create_sampling_client": sampler_answers,
    "save_weights_and_get_sampling_client": sampler_answers,
    "get_tokenizer": text_became_tokens,
}


@pytest.mark.parametrize("heading", [*SYNC, *ASYNC])
def test_the_example_runs(desk, page, heading):
    names = desk.run(page, heading)
    CHECKS[heading.removesuffix("_async")](desk, names)
