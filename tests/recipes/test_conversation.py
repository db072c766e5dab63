"""What stands between two turns: what the chat template has there, and nothing before it."""

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.recipes.fakes import byte_tokenizer_once
from xorl_lab.engine import models
from xorl_lab.errors import DataError
from xorl_lab.recipes.conversation import Conversation
from xorl_lab.recipes.prompts import Prompt, encode_prompts

SMOL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "How much is 12*7?"}]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VISIBLE = st.text(string.printable + "äß漢字🙂👩‍🔬\u200d", min_size=1, max_size=20)


def tokenizer_of(name):
    if name == "tiny":
        return byte_tokenizer_once()
    if name not in _loaded:
        _loaded[name] = models.tokenizer(name)
    return _loaded[name]


_loaded: dict = {}


@pytest.fixture(params=["tiny", SMOL])
def tokenizer(request):
    return tokenizer_of(request.param)


def begun(tokenizer, given=QUESTION):
    (prompt,) = encode_prompts([given], tokenizer)
    return Conversation(prompt, tokenizer), prompt


def whole(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("ended", [True, False])
def test_behind_a_turn_stands_what_the_template_has_there(tokenizer, ended):
    conversation, prompt = begun(tokenizer)
    tokens = list(prompt.tokens)
    messages = list(QUESTION)
    for turn, said in (("calc: 12*7", "84"), ("It is 84.", "Thanks 🙂"), ("ok", "")):
        drawn = tokenizer.encode(turn, add_special_tokens=False)
        drawn += [tokenizer.eos_token_id] if ended else []
        text, ids = conversation.reply(turn, drawn, said)
        tokens += [*drawn, *ids]
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": said}]
        assert tokens == whole(tokenizer, messages)
        assert tokenizer.encode(text, add_special_tokens=False)[-len(ids) :] == ids


def test_other_roles_and_several_messages(tokenizer):
    role = "system" if tokenizer is tokenizer_of("tiny") else "tool"
    for said in (
        {"role": role, "content": "84"},
        [{"role": role, "content": "84"}, {"role": "user", "content": "Well?"}],
    ):
        conversation, prompt = begun(tokenizer)
        drawn = [*tokenizer.encode("calc"), tokenizer.eos_token_id]
        _, ids = conversation.reply("calc", drawn, said)
        listed = said if isinstance(said, list) else [said]
        messages = [*QUESTION, {"role": "assistant", "content": "calc"}, *listed]
        assert [*prompt.tokens, *drawn, *ids] == whole(tokenizer, messages)


@given(turns=st.lists(st.tuples(st.binary(max_size=8), st.booleans(), TEXTS), min_size=1))
@example(turns=[(b"", True, ""), (b"", False, "\u200d"), (b"\xf0\x9f", False, "🙂")])
def test_of_whatever_was_drawn_nothing_is_encoded_again(turns):
    """The model's ids are any bytes, broken characters included; what stands behind is the same."""
    tokenizer = tokenizer_of("tiny")
    conversation, _ = begun(tokenizer)
    for drawn, ended, said in turns:
        tokens = [*drawn, *([tokenizer.eos_token_id] if ended else [])]
        _, ids = conversation.reply(tokenizer.decode(list(drawn)), tokens, said)
        written = f"<|bos|>user\n{said}<|eos|><|bos|>assistant\n"
        closed = written if ended else f"<|eos|>{written}"
        assert ids == tokenizer.encode(closed, add_special_tokens=False)


@given(turns=st.lists(st.tuples(st.lists(st.integers(3, 49151)), st.booleans(), VISIBLE)))
def test_the_same_with_a_real_vocabulary(turns):
    tokenizer = tokenizer_of(SMOL)
    conversation, _ = begun(tokenizer)
    for drawn, ended, said in turns:
        tokens = [*drawn, *([2] if ended else [])]
        _, ids = conversation.reply(tokenizer.decode(drawn), tokens, said)
        written = f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        encoded = tokenizer.encode(f"<|im_end|>{written}", add_special_tokens=False)
        assert ids == (encoded[1:] if ended else encoded)


@given(said=VISIBLE)
def test_behind_a_text_stands_text(said):
    for name in ("tiny", SMOL):
        tokenizer = tokenizer_of(name)
        conversation, _ = begun(tokenizer, "12*7=")
        text, ids = conversation.reply("5", [5], said)
        assert text == said
        assert ids == tokenizer.encode(said, add_special_tokens=False)


def test_a_template_that_rewrites_earlier_turns_changes_nothing_before():
    """As those do that drop what a model thought in turns that are over."""
    tokenizer = _with(
        "{% for m in messages %}<|bos|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] | trim }}{% else %}{{ m.content }}{% endif %}<|eos|>"
        "{% endfor %}{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
    )
    conversation, _ = begun(tokenizer)
    turn = "<think>seven times twelve</think> calc"
    _, ids = conversation.reply(turn, [*tokenizer.encode(turn), tokenizer.eos_token_id], "84")
    assert tokenizer.decode(ids) == "<|bos|>user\n84<|eos|><|bos|>assistant\n"


def test_a_template_without_the_turn_is_refused():
    conversation, _ = begun(_with("{{ messages[-1].content }}"))
    with pytest.raises(DataError, match="shows a turn of the model 0 times"):
        conversation.reply("a", [97], "b")


def test_a_role_that_the_template_refuses_is_an_error():
    conversation, _ = begun(
        _with("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
              "{% endif %}{{ m.content }}{% endfor %}")
    )  # fmt: skip
    with pytest.raises(DataError, match="refuses the conversation: no tools"):
        conversation.reply("a", [97], {"role": "tool", "content": "84"})


@pytest.mark.parametrize("said", [None, 84, [], b"84"])
@pytest.mark.parametrize("given", ["12*7=", QUESTION])
def test_what_is_no_text_is_an_error(given, said):
    conversation, _ = begun(byte_tokenizer_once(), given)
    with pytest.raises(DataError, match=r"the environment yielded|message 2 is"):
        conversation.reply("a", [97], said)


def test_an_empty_text_behind_text_is_an_error():
    conversation, _ = begun(byte_tokenizer_once(), "12*7=")
    with pytest.raises(DataError, match="yielded an empty text: yield at least one character"):
        conversation.reply("a", [97], "")


def test_halves_of_characters_are_an_error():
    conversation, _ = begun(byte_tokenizer_once(), "12*7=")
    with pytest.raises(DataError, match="cannot be encoded"):
        conversation.reply("a", [97], "\ud83d")


def test_what_is_said_may_hold_any_word():
    tokenizer = byte_tokenizer_once()
    conversation, _ = begun(tokenizer, [{"role": "user", "content": "THETURNOFTHEMODEL"}])
    _, ids = conversation.reply("a", [97, tokenizer.eos_token_id], "THETURNOFTHEMODELX")
    assert "THETURNOFTHEMODELX<|eos|>" in tokenizer.decode(ids)


def _with(template):
    from xorl_lab.engine.tiny import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_prompt_that_is_text_has_no_messages():
    prompt = Prompt("a", "a", [97], {})
    with pytest.raises(DataError, match="behind a prompt of text yield text"):
        Conversation(prompt, byte_tokenizer_once()).reply("a", [97], {"role": "user"})
