"""Everything that can be known and refused before an engine starts: files, tokenizer, template, resolved settings.

Loads no torch, so a start that cannot succeed is refused within a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tidemill.config import EngineArgs, EngineConfig, ModelFacts, resolve
from tidemill.errors import ConfigError
from tidemill.hardware import Hardware, detect
from tidemill.text.chat import ChatTemplate, load_chat_template
from tidemill.text.tokenizer import Tokenizer, load_tokenizer
from tidemill.weights.checkpoint import Checkpoint, open_checkpoint
from tidemill.weights.location import locate

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Prepared:
    config: EngineConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    default_sampling: Mapping[str, Any]
    hardware: Hardware


def prepare(args: EngineArgs, on_progress: Callable[[str, int, int], None] | None = None) -> Prepared:
    files = locate(args.model, revision=args.revision, on_progress=on_progress)
    checkpoint = open_checkpoint(files)
    tokenizer = load_tokenizer(
        files, tokenizer=args.tokenizer, revision=args.revision, trust_remote_code=args.trust_remote_code
    )
    hardware = detect()
    facts = ModelFacts(
        path=str(files.path.resolve()),
        kind=files.kind,
        origin=files.origin,
        raw_config=checkpoint.config,
        num_parameters=_num_parameters(checkpoint),
        stored_dtype=_stored_dtype(checkpoint),
        eos_ids=tuple(tokenizer.eos_ids),
    )
    config = resolve(args, facts, hardware)
    if args.tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer {args.tokenizer} has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}",
            param="tokenizer",
            fix="leave --tokenizer out, or name the model's own",
        )
    template = load_chat_template(files, args.chat_template)
    return Prepared(config, tokenizer, template, _sampling_defaults(checkpoint.generation_config), hardware)


def _num_parameters(checkpoint: Checkpoint) -> int:
    names = checkpoint.tensors
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    return sum(prod(info.shape) for name, info in names.items() if not (tied and name == "lm_head.weight"))


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The type most of the weights are stored in."""
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0]


def _sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: generation_config[key] for key in SAMPLING_DEFAULTS if generation_config.get(key) is not None}
    if generation_config.get("do_sample") is False:
        found.pop("temperature", None)
    return found
