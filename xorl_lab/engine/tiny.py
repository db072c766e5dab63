"""Two random models that need no download: ``tiny`` (dense) and ``tiny-moe`` (mixture of experts).

They exist so that every path of the engine can be tested in milliseconds.  Their weights are the
same on every machine, and large enough that the next-token distribution is far from uniform: a
test that compares logprobs would otherwise pass for almost any mistake.
"""

import zlib
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT = 512
"""Longest sequence of both models, in tokens."""
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")
"""Ids 256, 257 and 258, behind the 256 bytes."""
GAIN = 1.3
"""Linear weights have standard deviation GAIN / sqrt(inputs)."""
EMBEDDING_STD = 0.2
"""With width 64 and a normalised last layer, logits have standard deviation 0.2 * 8 = 1.6."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('role ' + message['role'] + ' is not one of system, user, assistant') -}}
{%- endif -%}
{{- bos_token + message['role'] + '\\n' + message['content'] + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- bos_token + 'assistant\\n' -}}{%- endif -%}"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0 to 255 are the bytes of UTF-8, followed by three special tokens.

    It adds nothing by itself, and decodes whatever it encoded to the same text.
    """
    raw = Tokenizer(BPE(vocab={piece: byte for byte, piece in enumerate(_pieces())}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    bos, eos, pad = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _pieces() -> list[str]:
    """How the ByteLevel pre-tokenizer writes each byte: printable ones as they are in Latin-1, the
    others, in order, as the characters from 256 on.
    """
    printable = {*range(ord("!"), 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def dense(dtype: torch.dtype) -> "PreTrainedModel":
    """The model ``tiny``: Llama, 2 layers of width 64, 4 heads over 2 key-value heads."""
    bos, eos, pad = range(256, 259)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return _build(LlamaForCausalLM, config, dtype)


def moe(dtype: torch.dtype) -> "PreTrainedModel":
    """The model ``tiny-moe``: Qwen3-MoE, 4 layers of width 64, 8 experts of which 2 are used."""
    bos, eos, pad = range(256, 259)
    config = Qwen3MoeConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return _build(Qwen3MoeForCausalLM, config, dtype)


def _build(
    architecture: "type[PreTrainedModel]",
    config: LlamaConfig | Qwen3MoeConfig,
    dtype: torch.dtype,
) -> "PreTrainedModel":
    """Make the model on the meta device, then fill it: nothing draws from the global generator."""
    with torch.device("meta"):
        skeleton = architecture(config)
    weights = {name: _draw(name, value.shape) for name, value in skeleton.named_parameters()}
    model = architecture.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, attn_implementation="sdpa"
    )
    # Loaded by the names that it has in memory.  Saved, its experts have names one by one, as other
    # programs read them: what they do not know they leave out in silence.
    model._weight_conversions = None  # pyright: ignore[reportArgumentType]
    return model


def _draw(name: str, shape: torch.Size) -> torch.Tensor:
    """The values of one parameter: they depend on its name and shape alone."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    std = EMBEDDING_STD if name.endswith("embed_tokens.weight") else GAIN / shape[-1] ** 0.5
    return torch.randn(shape, generator=generator, dtype=torch.float32) * std
