"""Small random checkpoints written with transformers' own classes, and its greedy answers to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TINY = {
    "vocab_size": 203,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.25,
}


def write_checkpoint(folder: Path, family: str, shard_size: str = "5GB", **config: Any) -> Any:
    """Save a random model of `family` (Llama, Gemma3, GPT2) and return it, in float32, for reference."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    return write_model(folder, kind(kind.config_class(**{**TINY, **config})), shard_size)


def write_model(folder: Path, model: Any, shard_size: str = "5GB") -> Any:
    """Save a model with random norms and biases, which transformers would leave at ones and zeros."""
    model = model.float().eval()
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # Other implementations of attention than this one ignore the cap, depending on transformers' release.
        model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")) or (tensor.dim() == 1 and name.endswith("weight")):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                tensor.normal_(0, 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    _write_tokenizer(folder, model.config.get_text_config().vocab_size)
    # The references ignore the end of sequence, as the requests compared with them do.
    model.generation_config.eos_token_id = None
    return model


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of single words, w0 w1 w2, so that any id can be written as text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' own generation, from a fresh rotary state so that earlier calls cannot change the frequencies."""
    reset_rope(model)
    ids = torch.tensor([prompt], device=model.device)
    # Without a mask, generate would guess one from the padding token and hide its occurrences in the prompt.
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return tokens[0, len(prompt) :].tolist()


def reset_rope(model: Any) -> None:
    rotary = model.model.rotary_emb
    if hasattr(rotary, "original_inv_freq"):
        rotary.inv_freq = rotary.original_inv_freq.clone()
        rotary.max_seq_len_cached = rotary.original_max_seq_len
