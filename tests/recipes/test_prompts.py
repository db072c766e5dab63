import pandas as pd
import pytest

from tests.recipes.fakes import byte_tokenizer_once
from xorl_lab.errors import ConfigError, DataError
from xorl_lab.recipes.prompts import Prompt, check_lengths, columns, encode_prompts


def encode(prompts):
    return encode_prompts(prompts, byte_tokenizer_once())


def test_strings_conversations_dicts_and_frames():
    messages = [{"role": "user", "content": "Hi"}]
    text, chat, row = encode(["ab", messages, {"prompt": "ab", "answer": 3}])
    assert (text.text, text.tokens, text.row) == ("ab", byte_tokenizer_once().encode("ab"), {})
    assert chat.text == "<|bos|>user\nHi<|eos|><|bos|>assistant\n"
    assert chat.given is messages
    assert chat.tokens[0] == 256
    assert chat.tokens.count(256) == 2
    assert row.row == {"answer": 3}
    frame = pd.DataFrame({"answer": [3, 4], "prompt": ["ab", "cd"]})
    assert [p.row for p in encode(frame)] == [{"answer": 3}, {"answer": 4}]
    assert columns(encode(frame)) == {"answer"}
    assert columns([text, row]) == set()


def test_nothing_is_added_to_a_prompt():
    class Adds:
        """A tokenizer that begins every sequence with a token unless told not to."""

        def encode(self, text, *, add_special_tokens=True):
            ids = byte_tokenizer_once().encode(text, add_special_tokens=False)
            return [256, *ids] if add_special_tokens else ids

    plain, given = encode_prompts(["ab", "<|bos|>ab"], Adds())
    assert plain.tokens.count(256) == 0
    assert given.tokens.count(256) == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there are no prompts: pass at least one"),
        (pd.DataFrame({"prompt": []}), "there are no prompts: pass at least one"),
        ("2+2=", "prompts is a str: pass a list of prompts or a DataFrame"),
        (7, "prompts is a int: pass a list of prompts or a DataFrame"),
        (["a", ""], "prompt 1 is empty: pass at least one token"),
        (["a", None], "prompt 1 is None: pass a string or a list of messages"),
        ([[]], "prompt 0 is []: pass a string or a list of messages"),
        (
            [{"question": "a"}],
            "row 0 has columns ['question'] but no 'prompt': name one of them prompt",
        ),
        (
            [{"role": "user", "content": "Hi"}],
            "row 0 has columns ['content', 'role'] but no 'prompt': wrap the conversation in a "
            "list",
        ),
        (
            [["Hi"]],
            "message 0 is 'Hi': pass a dict with the strings 'role' and 'content'",
        ),
        (
            [[{"role": "wizard", "content": "Hi"}]],
            "the tokenizer's chat template refuses the conversation: role wizard is not one of "
            "system, user, assistant. Change the roles or their order, or pass text instead of "
            "messages",
        ),
    ],
)
def test_bad_prompts(prompts, message):
    with pytest.raises(DataError) as caught:
        encode(prompts)
    assert str(caught.value) == message


def test_a_prompt_that_does_not_fit_names_both_numbers():
    prompts = [Prompt("", "", [1] * n) for n in (3, 8, 5)]
    check_lengths(prompts, max_tokens=4, context_length=12)
    with pytest.raises(ConfigError) as caught:
        check_lengths(prompts, max_tokens=5, context_length=12)
    assert str(caught.value) == (
        "prompt 1 has 8 tokens, which with max_tokens=5 makes 13, over the context of 12 tokens: "
        "shorten the prompt or lower max_tokens"
    )
