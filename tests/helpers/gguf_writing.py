"""A checkpoint of transformers written as GGUF: names by the gguf package's own table, metadata and changes to the
weights as llama.cpp's converter makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tidemill.weights.checkpoint import Checkpoint, open_checkpoint
from tidemill.weights.location import ModelFiles

MODEL_ARCH = gguf.MODEL_ARCH
GEMMAS = (MODEL_ARCH.GEMMA, MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3)
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""GPT-2's, which transformers stores [inputs, outputs]."""
LONG, SHORT = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0], [1.0, 1.0, 1.5, 1.5, 2.0, 2.0]


def convert(
    folder: Checkpoint,
    path: Path,
    arch: gguf.MODEL_ARCH,
    config: Any,
    kind: str = "F32",
    stacked: bool = True,
    vocabulary: str | None = None,
    split_max_tensors: int = 0,
) -> Checkpoint:
    """Matrices of layers are of `kind`; experts lie in stacks or, as they once did, one by one. With the name of a
    pre-tokenizer as `vocabulary`, tokens are w0, w1 and so on."""
    name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    common_metadata(writer, arch, config)
    extra_metadata(writer, arch, config)
    if vocabulary is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(vocabulary)
        writer.add_token_list([f"w{token}" for token in range(config.vocab_size)])
        writer.add_token_merges([])
    stacks: dict[str, list[torch.Tensor]] = {}
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def add(name: str, tensor: torch.Tensor) -> None:
        values = tensor.contiguous().numpy()
        if kind == "F32" or values.ndim < 2 or not name.startswith("blk.") or "gate_inp" in name:
            writer.add_tensor(name, values)
        else:
            stored = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)

    for name in folder.tensors:
        tensor = as_converted(name, folder.read(name), arch, config)
        parts = name.split(".")
        if "experts" in parts:
            expert = parts.pop(parts.index("experts") + 1)
            whole = names.get_name(".".join(parts), (".weight",))
            if stacked:
                stacks.setdefault(whole, []).append(tensor)
            else:
                add(whole.replace("_exps", f".{expert}"), tensor)
            continue
        add(names.get_name(name, (".weight", ".bias")), tensor)
    for name, experts in stacks.items():
        add(name, torch.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split_max_tensors:
        path = min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return open_checkpoint(ModelFiles("gguf", path, str(path)))


def as_converted(name: str, tensor: torch.Tensor, arch: gguf.MODEL_ARCH, config: Any) -> torch.Tensor:
    if arch in GEMMAS and name.endswith("norm.weight"):
        return tensor + 1
    if arch == MODEL_ARCH.GPT2 and name.endswith(TRANSPOSED):
        return tensor.t()
    if arch == MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def common_metadata(writer: gguf.GGUFWriter, arch: gguf.MODEL_ARCH, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(config.n_inner if arch == MODEL_ARCH.GPT2 else config.intermediate_size)
    if arch == MODEL_ARCH.GPT2:
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        if arch == MODEL_ARCH.PHI2:
            writer.add_layer_norm_eps(config.layer_norm_eps)
        else:
            writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key in ("bos", "eos", "pad"):
        if (token := getattr(config, f"{key}_token_id")) is not None:
            getattr(writer, f"add_{key}_token_id")(token)


def extra_metadata(writer: gguf.GGUFWriter, arch: gguf.MODEL_ARCH, config: Any) -> None:
    if arch in (*GEMMAS, MODEL_ARCH.QWEN3MOE):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3, MODEL_ARCH.PHI3):
        writer.add_sliding_window(config.sliding_window)
    if arch == MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    elif arch == MODEL_ARCH.GEMMA3:
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        if config.rope_parameters["full_attention"]["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(config.rope_parameters["full_attention"]["factor"])
    elif arch == MODEL_ARCH.PHI3:
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        if config.rope_parameters["rope_type"] == "longrope":
            writer.add_rope_scaling_attn_factors(1.1)
            writer.add_tensor("rope_factors_long.weight", np.array(LONG, np.float32))
            writer.add_tensor("rope_factors_short.weight", np.array(SHORT, np.float32))
    elif arch == MODEL_ARCH.QWEN3MOE:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    elif arch == MODEL_ARCH.PHI2:
        writer.add_rope_dimension_count(round(config.rope_parameters["partial_rotary_factor"] * head_dim(config)))
    elif arch == MODEL_ARCH.LLAMA:
        writer.add_rope_dimension_count(head_dim(config))
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if getattr(config, "sliding_window", None):
            writer.add_sliding_window(config.sliding_window)
        if getattr(config, "num_local_experts", None):
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
