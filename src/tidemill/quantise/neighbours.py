"""The files beside the weights: tokenizer, chat template, generation settings, licence.

A folder's are copied. A GGUF file holds them as metadata, of which files are made.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tidemill.quantise.folder import write_text
from tidemill.text.chat import DEFAULT
from tidemill.text.chat_files import load_chat_template
from tidemill.text.tokenizer import Tokenizer
from tidemill.weights.checkpoint import Checkpoint

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".npz", ".ckpt")
NOT_COPIED = ("config.json", "README.md", ".gitattributes")
LARGEST = 2**28


def copy_neighbours(folder: Path, out: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_file() and _travels(path):
            shutil.copyfile(path, out / path.name)
    templates = folder / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, out / templates.name, dirs_exist_ok=True)


def _travels(path: Path) -> bool:
    if path.name in NOT_COPIED or path.name.endswith(".index.json") or path.suffix in WEIGHTS:
        return False
    return path.stat().st_size < LARGEST


def make_neighbours(checkpoint: Checkpoint, tokenizer: Tokenizer, out: Path) -> None:
    """From a GGUF file."""
    tokenizer.backend.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config.get("max_position_embeddings"),
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens_map,
    }
    write_text(out / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False))
    if checkpoint.generation_config:
        write_text(out / "generation_config.json", json.dumps(checkpoint.generation_config, indent=2))
    template = load_chat_template([checkpoint.files], tokenizer.special_tokens_map)
    if template is None:
        return
    for name, text in template.sources.items():
        if name == DEFAULT:
            write_text(out / "chat_template.jinja", text)
        else:
            (out / "additional_chat_templates").mkdir(exist_ok=True)
            write_text(out / "additional_chat_templates" / f"{name}.jinja", text)
