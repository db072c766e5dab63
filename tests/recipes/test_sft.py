import dataclasses

import pytest

from tests.recipes.fakes import EOS, FakeClient, byte_tokenizer_once
from xorl_lab.errors import ConfigError, DataError, ShapeError
from xorl_lab.recipes.sft import SftSettings, read_examples, render, sft

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


class Templated:
    """The byte tokenizer with another way of writing conversations."""

    bos_token = "<|bos|>"

    def __init__(self, template):
        self.template = template
        self.all_special_ids = byte_tokenizer_once().all_special_ids

    def encode(self, text, *, add_special_tokens=True):
        return byte_tokenizer_once().encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert tokenize is False
        return self.template(conversation, add_generation_prompt)


def chatml(conversation, generate):
    """As SmolLM2: a system prompt where there is none, and a newline behind each turn."""
    if conversation[0]["role"] != "system":
        conversation = [{"role": "system", "content": "Be kind."}, *conversation]
    turns = "".join(f"<|bos|>{m['role']}\n{m['content']}<|eos|>\n" for m in conversation)
    return turns + ("<|bos|>assistant\n" if generate else "")


def trained_text(rendered):
    ids = [t for t, w in zip(rendered.tokens, rendered.weights, strict=True) if w]
    return byte_tokenizer_once().decode(ids)


def test_only_the_assistant_is_trained_and_its_end_too():
    rendered = render(CHAT, byte_tokenizer_once())
    assert rendered.text == (
        "<|bos|>user\nHi<|eos|><|bos|>assistant\nHello<|eos|>"
        "<|bos|>user\nBye<|eos|><|bos|>assistant\nSee you<|eos|>"
    )
    assert trained_text(rendered) == "Hello<|eos|>See you<|eos|>"
    assert byte_tokenizer_once().decode(rendered.tokens) == rendered.text
    assert rendered.tokens.count(256) == 4


def test_the_templates_own_system_prompt_is_shown_and_not_trained():
    rendered = render(CHAT[:2], Templated(chatml))
    assert rendered.text.startswith("<|bos|>system\nBe kind.<|eos|>\n")
    assert trained_text(rendered) == "Hello<|eos|>"
    assert rendered.tokens[-2:] == [EOS, byte_tokenizer_once().encode("\n")[0]]
    assert rendered.weights[-2:] == [1.0, 0.0]


def test_a_user_message_at_the_end_is_context():
    rendered = render(CHAT[:3], byte_tokenizer_once())
    assert rendered.text.endswith("<|bos|>user\nBye<|eos|>")
    assert trained_text(rendered) == "Hello<|eos|>"


def test_the_prompt_of_a_turn_has_the_tokens_that_sampling_sees():
    class Merging(Templated):
        """Two newlines are one token, as in many vocabularies."""

        def encode(self, text, *, add_special_tokens=True):
            parts = text.split("\n\n")
            ids = [super(Merging, self).encode(p) for p in parts]
            return ids[0] + [t for part in ids[1:] for t in [300, *part]]

    tokenizer = Merging(chatml)
    rendered = render([CHAT[0], {"role": "assistant", "content": "\nHello"}], tokenizer)
    prompt = tokenizer.encode(chatml(CHAT[:1], True))
    assert rendered.tokens[: len(prompt)] == prompt
    assert rendered.weights[: len(prompt)] == [0.0] * len(prompt)
    assert rendered.weights[len(prompt)] == 1.0


def test_without_special_tokens_the_whole_turn_is_trained():
    def plain(conversation, generate):
        turns = "".join(f"{m['role']}: {m['content']}\n" for m in conversation)
        return turns + ("assistant: " if generate else "")

    assert trained_text(render(CHAT[:2], Templated(plain))) == "Hello\n"


def test_a_template_that_rewrites_earlier_turns_is_refused():
    def forgetful(conversation, generate):
        last = len(conversation) - 1
        kept = [
            {**m, "content": m["content"] if i == last else m["content"].split("</think>")[-1]}
            for i, m in enumerate(conversation)
        ]
        return chatml(kept, generate)

    thinking = [CHAT[0], {"role": "assistant", "content": "<think>Hm</think>Hello"}, *CHAT[2:]]
    with pytest.raises(DataError) as caught:
        render(thinking, Templated(forgetful))
    assert str(caught.value) == (
        "the chat template rewrites earlier text when message 3 is added, so the tokens trained "
        "would not be those sampled: train on one turn at a time, or pass tokens and weights"
    )
    assert trained_text(render(thinking[:2], Templated(forgetful))).startswith("<think>Hm</think>")


def test_datum_shifts_targets_and_weights_together():
    datum = read_examples(
        [{"tokens": [5, 6, 7], "weights": [1, 0, 0.5]}], byte_tokenizer_once(), 9
    )[0].datum()
    assert datum.model_input.to_ints() == [5, 6]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7]
    assert datum.loss_fn_inputs["weights"].tolist() == [0, 0.5]


def test_the_end_of_sequence_is_a_trained_target_even_where_it_is_the_padding():
    datum = render(CHAT[:2], byte_tokenizer_once()).datum()
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    weights = datum.loss_fn_inputs["weights"].tolist()
    assert (targets[-1], weights[-1]) == (EOS, 1.0)


@pytest.mark.parametrize(
    ("examples", "error", "message"),
    [
        ([], DataError, "there are no examples: pass at least one"),
        (
            [{"tokens": [1, 2], "weights": [1]}],
            ShapeError,
            "example 0 has 2 tokens but 1 weights: pass one weight per token",
        ),
        (
            [{"tokens": [1], "weights": [1]}],
            DataError,
            "example 0 has 1 tokens: pass at least 2",
        ),
        (
            [{"tokens": [1, 2], "weights": [1, 0]}],
            DataError,
            "example 0 has nothing to train: every weight behind the first token is 0",
        ),
        (
            [{"tokens": [1] * 9, "weights": [1] * 9}],
            DataError,
            "example 0 has 9 tokens, over the context of 8: shorten it; cutting it would train the "
            "model to break off",
        ),
        (
            ["Hello"],
            DataError,
            "example 0 is 'Hello': pass a list of messages, as [{'role': 'user', 'content': …}, "
            "{'role': 'assistant', 'content': …}], or a dict with 'tokens' and 'weights'",
        ),
        (
            [CHAT[:1]],
            DataError,
            "example 0: a conversation with roles ['user'] cannot be trained on: it needs an "
            "assistant message, and a message before the first of them",
        ),
        (
            [{"messages": CHAT[1:2]}],
            DataError,
            "example 0: a conversation with roles ['assistant'] cannot be trained on: it needs an "
            "assistant message, and a message before the first of them",
        ),
    ],
)
def test_bad_examples(examples, error, message):
    with pytest.raises(error) as caught:
        read_examples(examples, byte_tokenizer_once(), 8)
    assert str(caught.value) == message


def test_settings_are_checked_before_anything_runs():
    client = FakeClient(None)
    for settings, message in [
        ({"learning_rate": 1e-3}, "steps=None and epochs=None: pass one of the two"),
        ({"learning_rate": 1e-3, "steps": 0}, "steps is 0: pass an integer >= 1"),
        (
            {"steps": 1},
            "missing setting learning_rate: pass learning_rate=1e-4, or whatever suits",
        ),
        (
            {"learning_rate": 1e-3, "steps": 1, "batchsize": 2},
            "unknown setting 'batchsize': did you mean batch_size?",
        ),
        ({"learning_rate": 0, "steps": 1}, "learning_rate is 0: pass a number > 0"),
    ]:
        with pytest.raises(ConfigError) as caught:
            sft(client, [CHAT], **settings)
        assert str(caught.value) == message
    assert client.calls == []


def test_epochs_are_rounded_up():
    settings = SftSettings(learning_rate=1e-3, epochs=3, batch_size=4)
    assert settings.step_count(5) == 4
    assert settings.step_count(4) == 3


def test_the_loop_sees_every_example_once_per_epoch():
    client = FakeClient(None)
    examples = [{"tokens": [i, i + 1], "weights": [0, 1]} for i in range(6)]
    records = list(
        sft(client, examples, held_out=examples[:1], learning_rate=1e-3, epochs=2, batch_size=2)
    )
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    calls = client.named("forward_backward")
    assert all(c.loss_fn == "cross_entropy" for c in calls)
    seen = [d.model_input.tokens[0] for c in calls for d in c.data]
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert seen[:6] != seen[6:]
    assert "held_out:loss" not in records[0].metrics
    assert records[-1].metrics["held_out:loss"] == 0.25
    assert records[-1].metrics["version"] == 6
    assert {"loss:mean", "grad_norm", "seconds:train", "tokens_per_second"} <= set(
        records[0].metrics
    )


def conversations(count):
    return [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}"}]
        for i in range(count)
    ]


def trained_on(client):
    calls = client.named("forward_backward")
    return [[d.model_input.to_ints() for d in call.data] for call in calls]


def test_a_run_taken_up_behind_some_steps_trains_on_what_would_have_come():
    settings = {"learning_rate": 1e-3, "epochs": 3, "batch_size": 2, "seed": 4}
    whole, rest = FakeClient(None), FakeClient(None)
    records = list(sft(whole, conversations(5), **settings))
    again = list(sft(rest, conversations(5), done=3, **settings))
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [r.step for r in again] == [4, 5, 6, 7, 8]
    assert trained_on(rest) == trained_on(whole)[3:]
    assert list(sft(rest, conversations(5), done=8, **settings)) == []


@pytest.mark.parametrize("done", [-1, 1.5, True, None])
def test_done_is_checked_before_anything_runs(done):
    with pytest.raises(ConfigError, match=r"done is .*: pass an integer >= 0"):
        sft(FakeClient(None), conversations(2), done=done, learning_rate=1e-3, steps=1)


def test_settings_are_asked_for_before_each_step():
    client, rates = FakeClient(None), iter([1e-3, 2e-3, 3e-3])

    def live(given):
        return dataclasses.replace(given, learning_rate=next(rates))

    list(sft(client, conversations(2), live=live, learning_rate=1.0, steps=3))
    assert [c.params["learning_rate"] for c in client.named("optim_step")] == [1e-3, 2e-3, 3e-3]
