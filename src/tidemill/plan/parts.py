"""What a model takes of a device's memory beside its KV cache, part by part: the formulas that planning adds up.

Each is checked against measurement; constants are what was measured. Torch-free. Knows shapes and sizes, but neither
how much memory there is nor what the user asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.models.shape import ModelShape

MIB = 2**20
GATHERED_TOKENS = 32768
"""Most tokens of keys and values that attention copies together out of the cache, see `layers/attention.py`."""
SCORES_BY_HAND = 2**21
"""Most scores that attention holds at a time where it computes them itself, see `ops/reference.py`."""
RUNTIME_BYTES = 400 * MIB
"""What Python, torch and its thread pools hold before any model: measured 300 to 400 MB."""
CUDA_BYTES = 614 * MIB
"""What a CUDA context, cuBLAS with its workspaces and loaded kernels hold of a card."""
GRAPH_BASE_BYTES = 20 * MIB
GRAPH_BYTES = 4 * MIB
"""Of each captured graph, beside the tensors that all of them share and the outputs that each keeps."""
GRAPH_LOGIT_ROWS = 16
"""Most sequences of a graph that keeps logits as well as hidden states, see `runtime/device_runner.py`."""
LOGIT_COPIES = 4
"""float32 copies of the logits that sampling may hold at once."""
SCORED_AT_ONCE = 128
"""Positions of a prompt that are scored together, see `runtime/runner.py`."""
PENALTY_COUNT_BYTES = 32 * MIB
"""Most that counting tokens for penalties takes, see `runtime/device_edits.py`."""
SPLIT_PROGRAMS = 1024
"""Most parts that decode attention is cut into, see `ops/triton`."""


@dataclass(frozen=True)
class Load:
    """The largest step, and how it is computed."""

    shape: ModelShape
    tokens: int
    rows: int
    element_size: int
    block_size: int
    graph_sizes: Sequence[int] = ()
    scratch: int = 0
    """Bytes of a matrix unpacked at a time."""


def activations(shape: ModelShape, tokens: int, rows: int, length: int, element_size: int) -> int:
    """Peak of a step on a CPU beside weights and cache: the widest layer's tensors for every token, the rows' logits,
    what attention gathers (one group's keys and values, and a chunk's mask over the whole context), and rotary
    tables."""
    layer = element_size * tokens * (3 * shape.hidden_size + shape.widest_layer)
    logits = 4 * LOGIT_COPIES * min(rows, tokens) * shape.vocab_size
    gathered = max(length, min(GATHERED_TOKENS, rows * length))
    keys_values = element_size * gathered * max(cache.kv_heads * 2 * cache.key_dim for cache in shape.caches)
    masks = (element_size + 1) * tokens * length * len(set(shape.layout.windows))
    scores = 3 * 4 * SCORES_BY_HAND if shape.scores_by_hand else 0
    return layer + logits + keys_values + masks + scores + 4 * shape.rope_width * length


def gpu_parts(load: Load, length: int) -> dict[str, int]:
    """Kernels read keys and values where they lie and make no masks: what is left are the tokens' own tensors."""
    shape = load.shape
    rows = load.rows + 1
    tables = 4 * rows * (length + 1) + 4 * rows * -(-length // load.block_size) * len(shape.layout.windows)
    return {
        "activations": _layer(load, load.tokens) + _logits(load) + _partials(shape) + load.scratch,
        "graphs": _graphs(load),
        "tables": tables + 4 * shape.rope_width * length + min(PENALTY_COUNT_BYTES, 4 * rows * shape.vocab_size),
    }


def _graphs(load: Load) -> int:
    sizes = load.graph_sizes
    if not sizes:
        return 0
    hidden = load.element_size * load.shape.hidden_size * sum(sizes)
    logits = 4 * load.shape.vocab_size * sum(size for size in sizes if size <= GRAPH_LOGIT_ROWS)
    return GRAPH_BASE_BYTES + GRAPH_BYTES * len(sizes) + _layer(load, max(sizes)) + hidden + logits


def _layer(load: Load, tokens: int) -> int:
    return load.element_size * tokens * (3 * load.shape.hidden_size + load.shape.widest_layer)


def _logits(load: Load) -> int:
    return 4 * LOGIT_COPIES * min(max(load.rows, SCORED_AT_ONCE), load.tokens) * load.shape.vocab_size


def _partials(shape: ModelShape) -> int:
    """What the parts of a long context find of a token's heads, before it is put together."""
    per_kv_head = max((shape.query_width or shape.hidden_size) // cache.kv_heads for cache in shape.caches)
    return 4 * SPLIT_PROGRAMS * per_kv_head


def cache_bytes_per_token(shape: ModelShape, element_size: int, *, scaled: bool) -> int:
    """Of one page. Quantised numbers have a float32 scale per head, for keys and for values."""
    total = shape.layout.numbers_per_token * element_size
    if scaled:
        total += sum(4 * cache.kv_heads * (2 if cache.value_dim else 1) for cache in shape.layout.shapes)
    return total
