"""A mixture of experts in a real SGLang: the trainer goes through the experts that it chose."""

import numpy as np
import pytest

import xorl_lab as xl
from tests.parity.check import Gap, show
from tests.sglang import need_sglang

PROMPTS = [list(b"The experts of this sentence are"), list(b"0123456789"), list(b"?")]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_with_replay_equals_the_server(served, tmp_path, temperature):
    """Prompt included, whatever was in the server's prefix cache; 1e-3 nats, in fp32."""
    client = xl.SamplingClient(served.url)
    service = xl.ServiceClient(home=tmp_path, device="cpu", dtype="float32")
    trainer = service.create_lora_training_client("tiny-moe", rank=4, model_id="r3", seed=1)
    params = xl.SamplingParams(
        max_tokens=24, temperature=temperature, seed=1, return_routed_experts=True
    )
    drawn = [
        (prompt, sequence)
        for _ in range(2)
        for prompt in PROMPTS
        for sequence in client.sample(xl.ModelInput.from_ints(prompt), params, 3).result().sequences
    ]
    data, free = [], []
    for prompt, sequence in drawn:
        tokens = [*prompt, *sequence.tokens]
        count = len(sequence.tokens)
        assert sequence.routed_experts.shape == (len(tokens) - 1, 4, 2)
        inputs = {"target_tokens": tokens[1:], "weights": [0.0] * (len(prompt) - 1) + [1.0] * count}
        tokens_in = xl.ModelInput.from_ints(tokens[:-1])
        data.append(xl.Datum(tokens_in, inputs, sequence.routed_experts))
        free.append(xl.Datum(tokens_in, inputs))
    gaps = {}
    for name, which in (("replayed", data), ("free", free)):
        outputs = trainer.forward(which, loss_fn_params={"logprob_temperature": temperature})
        ours = [
            np.asarray(out.logprobs.data)[-len(s.tokens) :]
            for out, (_, s) in zip(outputs.result().loss_fn_outputs, drawn, strict=True)
        ]
        theirs = np.concatenate([np.asarray(s.logprobs) for _, s in drawn])
        gaps[name] = Gap.between(np.concatenate(ours), theirs)
        show(f"tiny-moe, real SGLang, T={temperature}, {name}", gaps[name])
    assert gaps["replayed"].max <= 1e-3


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of ``tiny-moe`` that tells the experts."""
    need_sglang()
    from xorl_lab.samplers.sglang.server import SGLangServer

    log = tmp_path_factory.mktemp("moe") / "server.log"
    with SGLangServer.start(
        "tiny-moe", dtype="float32", device="cpu", max_rank=None, experts=True, log=log
    ) as server:
        yield server
