"""Everything that can be known and refused before an engine starts: files, tokenizer, template, resolved settings.

Loads no torch, so a start that cannot succeed is refused within a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tidemill.config import EngineArgs, EngineConfig, ModelFacts, check_load_format, resolve
from tidemill.core.params import SamplingParams
from tidemill.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from tidemill.hardware import Hardware, detect
from tidemill.models.choice import choose
from tidemill.models.count import count_weights
from tidemill.models.names import stored_names, with_stored_head
from tidemill.precision import StoredWeights
from tidemill.text.chat import ChatTemplate
from tidemill.text.chat_files import load_chat_template
from tidemill.text.tokenizer import Tokenizer, load_tokenizer
from tidemill.text.vocabulary import check_vocabulary
from tidemill.weights.checkpoint import Checkpoint
from tidemill.weights.dummy import DummyCheckpoint, open_for
from tidemill.weights.location import locate
from tidemill.weights.quantised import described, not_followed, refuse_unknown
from tidemill.weights.renamed import RenamedCheckpoint

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Note:
    """Something about this model that whoever starts it should know: of what, what, and why or what to do."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Prepared:
    config: EngineConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    default_sampling: Mapping[str, Any]
    hardware: Hardware
    notes: tuple[Note, ...] = ()


def prepare(args: EngineArgs, on_progress: Callable[[str, int, int], None] | None = None) -> Prepared:
    check_load_format(args.load_format)
    wants_weights = args.load_format != "dummy"
    files = locate(args.model, revision=args.revision, on_progress=on_progress, weights=wants_weights)
    checkpoint = open_for(files, args.load_format)
    refuse_unknown(checkpoint)
    choice = choose(checkpoint.config, files.path, files.kind, args.model_impl, args.trust_remote_code, on_progress)
    spec = choice.spec
    if spec is None and checkpoint.format is not None:
        raise UnsupportedModel(
            f"{files.origin} is quantised as {checkpoint.format}, and its architecture is not native",
            cause="quantised weights are read for native architectures; this one runs through transformers' own code",
            fix="serve the unquantised checkpoint",
        )
    if spec is not None and checkpoint.tensors:
        if (names := stored_names(spec, checkpoint.tensors)) is not None:
            checkpoint = RenamedCheckpoint(checkpoint, names)
        spec = with_stored_head(spec, checkpoint.tensors)
    tokenizer = load_tokenizer(
        files,
        tokenizer=args.tokenizer,
        revision=args.tokenizer_revision if args.tokenizer else args.revision,
        trust_remote_code=args.trust_remote_code,
    )
    hardware = detect()
    count = None if spec is None else count_weights(spec)
    facts = ModelFacts(
        path=str(files.path.resolve()),
        kind=files.kind,
        origin=files.origin,
        shape=choice.shape,
        impl=choice.impl,
        impl_why=choice.why,
        num_parameters=_num_parameters(checkpoint) if count is None else count.numbers,
        stored=StoredWeights(
            _stored_dtype(checkpoint), checkpoint.format, dict(checkpoint.schemes), described(checkpoint)
        ),
        eos_ids=tuple(tokenizer.eos_ids),
        count=count,
    )
    config = resolve(args, facts, hardware)
    template = load_chat_template([tokenizer.files, files], tokenizer.special_tokens_map, args.chat_template)
    notes = []
    if vocabulary := check_vocabulary(tokenizer, template, config.vocab_size, args.tokenizer):
        notes.append(Note("vocabulary", f"{tokenizer.vocab_size:,} tokens", vocabulary))
    if choice.notable:
        notes.append(Note("runs", choice.impl, choice.why))
    if config.trust_remote_code and config.model_impl == "transformers" and checkpoint.config.get("auto_map"):
        notes.append(Note("code", "the model's own runs", _code_advice(args)))
    notes += [Note("quantised", checkpoint.format or "", note) for note in not_followed(checkpoint)]
    defaults = _sampling_defaults(checkpoint)
    return Prepared(config, tokenizer, template, defaults, hardware, tuple(notes))


def _code_advice(args: EngineArgs) -> str:
    if args.revision is not None:
        return f"--trust-remote-code as asked for, at revision {args.revision}"
    return "--trust-remote-code as asked for; pin what you have read with --revision COMMIT"


def _num_parameters(checkpoint: Checkpoint) -> int:
    """Of what transformers will load: a head that is tied to the embedding may be stored all the same."""
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    return sum(prod(info.shape) for name, info in checkpoint.tensors.items() if not (tied and name == "lm_head.weight"))


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """The type most of the weights are stored in."""
    if isinstance(checkpoint, DummyCheckpoint):
        return checkpoint.stored_dtype
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0]


def _sampling_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the model's author recommends, checked here: a client must not be told of a mistake in a file."""
    recommended = checkpoint.generation_config
    found = {key: recommended[key] for key in SAMPLING_DEFAULTS if recommended.get(key) is not None}
    if recommended.get("max_new_tokens") is not None:
        found["max_tokens"] = recommended["max_new_tokens"]
    if recommended.get("do_sample") is False:
        found.pop("temperature", None)
    try:
        SamplingParams(**found)
    except InvalidRequest as problem:
        raise BadCheckpoint(
            f"{checkpoint.files.origin}: generation_config.json cannot be followed",
            cause=problem.message,
            fix="correct it, or delete the file",
        ) from problem
    return found
