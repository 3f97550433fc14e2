"""transformers' reading of a GGUF, without the minutes it takes over a large vocabulary.

The file is copied tensor by tensor, bytes untouched, with every metadata entry but the vocabulary's lists, which
transformers walks string by string several times before it comes to the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tidemill.weights.gguf_file import read_gguf


def transformers_reading(path: Path, scratch: Path) -> Any:
    """The model in float32, dequantised by transformers."""
    from transformers import AutoModelForCausalLM, GgufConfig

    _copy_without_vocabulary(path, scratch / path.name)
    return AutoModelForCausalLM.from_pretrained(
        scratch, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()


def _copy_without_vocabulary(path: Path, target: Path) -> None:
    file = read_gguf(path)
    architecture = file.metadata["general.architecture"]
    writer = gguf.GGUFWriter(target, architecture)
    for key, value in file.metadata.items():
        if key != "general.architecture" and not (key.startswith("tokenizer.ggml.") and isinstance(value, list)):
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_uint32(f"{architecture}.vocab_size", file.tensors["token_embd.weight"].shape[0])
    for tensor in file.tensors.values():
        raw, kind = file.raw(tensor), gguf.GGMLQuantizationType[tensor.type]
        data = raw.view(np.float32) if tensor.type == "F32" else raw
        writer.add_tensor(tensor.name, data.reshape(*tensor.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
