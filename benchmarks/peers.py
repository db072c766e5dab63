"""The worker that measures trl, transformers and peft.  Runs in the peers' environment.

They get what their makers recommend for speed: scaled-dot-product attention, a key-value cache, no
gradient checkpointing, no gradient while drawing.
"""

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks import workload
from benchmarks.channel import Channel

GROUP, ROWS = 8, 32
LORA = LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
)


def grpo(channel: Channel) -> None:
    """One GRPO step of trl per round."""
    # Imported here: seconds and memory that only this case needs.
    from datasets import Dataset  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    settings = channel.job.settings
    micro_batch = settings["micro_batch"] or ROWS
    tokenizer = _tokenizer(channel)
    texts = workload.prompts(tokenizer, settings["prompt_tokens"])
    length = sum(len(tokenizer.encode(t, add_special_tokens=False)) for t in texts) / len(texts)
    rounds = Rounds(channel, workload.REWARDS[settings["reward"]], length)
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=ROWS // micro_batch,
            num_generations=GROUP,
            max_completion_length=settings["max_tokens"],
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            warmup_steps=0,
            adam_beta2=0.99,
            weight_decay=0,
            max_grad_norm=1.0,
            beta=0.0,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_iterations=1,
            loss_type="dapo",
            scale_rewards="group",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=channel.job.dtype == "bfloat16",
            gradient_checkpointing=False,
            use_vllm=False,
            max_steps=1_000_000,
            disable_tqdm=True,
            logging_strategy="no",
            seed=settings["seed"],
        )
        trainer = GRPOTrainer(
            model=_model(channel),
            reward_funcs=rounds.reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": t} for t in texts]),
            processing_class=tokenizer,
            peft_config=LORA,
            callbacks=[rounds],
        )
        channel.ready()
        trainer.train()


class Rounds(TrainerCallback):
    """Holds the trainer before each step until a round is asked for.

    A step here is drawing, scoring, loss and optimizer: trl draws in ``training_step``, behind
    ``on_step_begin``.
    """

    def __init__(
        self, channel: Channel, score: Callable[[str], float], prompt_tokens: float
    ) -> None:
        self._channel = channel
        self._score = score
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._rewards: list[float] = []

    def reward(
        self,
        completions: list[str],
        completion_ids: list[list[int]],
        **_: Any,  # noqa: ANN401 (whatever else trl passes)
    ) -> list[float]:
        """Score the completions of a step, and take note of them."""
        self._tokens = sum(len(ids) for ids in completion_ids)
        self._rewards = [self._score(text) for text in completions]
        return self._rewards

    def on_step_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Wait for the next round."""
        self._channel.wait()
        self._channel.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Report it."""
        self._channel.stop()
        self._channel.answer(
            self._tokens,
            prompt_tokens=self._prompt_tokens,
            reward=sum(self._rewards) / len(self._rewards),
            without_signal=workload.without_signal(self._rewards, GROUP),
        )


def sampling(channel: Channel) -> None:
    """The generate of transformers, on prompts padded on the left."""
    model = _model(channel).eval()
    tokenizer = _tokenizer(channel)
    texts = workload.openings()
    channel.ready()
    while True:
        command = channel.wait()
        channel.start()
        inputs = tokenizer(
            texts[: command["prompts"]],
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
        )
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                **workload.UNTRUNCATED,
                num_return_sequences=command["samples"],
                max_new_tokens=command["tokens"],
                pad_token_id=tokenizer.pad_token_id,
            )
        channel.stop()
        drawn = output[:, inputs["input_ids"].shape[1] :]
        # What comes behind the end of a row is padding; the end itself was drawn.
        ends = (drawn == tokenizer.eos_token_id).int()
        channel.answer(int((ends.cumsum(-1) - ends == 0).sum()))


def train(channel: Channel) -> None:
    """A plain loop of peft on rows padded on the right."""
    model = get_peft_model(_model(channel), LORA).train()
    vocabulary = model.config.get_text_config().vocab_size
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    channel.ready()
    while True:
        command = channel.wait()
        if "lengths" in command:
            sequences = workload.random_tokens(command["lengths"], vocabulary)
            first, loss_of = 1, _cross_entropy
        else:
            sequences = workload.shared(command, vocabulary)
            first, loss_of = command["prompt"], _policy
        channel.start()
        loss = loss_of(model, sequences, first)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 5.0)
        optimizer.step()
        optimizer.zero_grad()
        channel.stop()
        channel.answer(sum(len(s) - first for s in sequences), loss=loss.item())


def _cross_entropy(model: Any, sequences: list[list[int]], _: int) -> torch.Tensor:  # noqa: ANN401
    """The model's own loss on padded rows, a mean over all tokens but the first of each."""
    width = max(len(s) for s in sequences)
    ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences])
    mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences])
    labels = ids.masked_fill(mask == 0, -100)
    return model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss


def _policy(model: Any, sequences: list[list[int]], first: int) -> torch.Tensor:  # noqa: ANN401
    """Policy gradient with importance weights; the head runs on the completions alone."""
    ids = torch.tensor(sequences)
    count = ids.shape[1] - first
    logits = model(input_ids=ids, logits_to_keep=count + 1, use_cache=False).logits[:, :-1]
    logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, first:, None]).squeeze(-1)
    old, advantage = workload.old(logits.shape[-1])
    return -((logprobs - old).exp() * advantage).mean()


def _model(channel: Channel) -> Any:  # noqa: ANN401 (transformers' classes are chosen at run time)
    return AutoModelForCausalLM.from_pretrained(
        channel.job.model,
        dtype=getattr(torch, channel.job.dtype),
        attn_implementation="sdpa",
        local_files_only=True,
    )


def _tokenizer(channel: Channel) -> Any:  # noqa: ANN401
    return AutoTokenizer.from_pretrained(
        channel.job.model, padding_side="left", local_files_only=True
    )


CASES = {f.__name__: f for f in (grpo, sampling, train)}


def main() -> None:
    """Serve one case."""
    channel = Channel(sys.argv)
    torch.set_num_threads(channel.job.threads)
    torch.manual_seed(channel.job.settings.get("seed", 0))
    CASES[channel.job.case](channel)


if __name__ == "__main__":
    main()
