"""Builds a runner from a resolved configuration: model, weights, cache, rows, and one step to warm everything up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from tidemill.config import EngineConfig
from tidemill.core.params import SamplingParams
from tidemill.core.step import NewRow, Slice, Step
from tidemill.layers.attention import PagedAttention
from tidemill.layers.parameter import Placement
from tidemill.models.registry import decoder_config, model_class
from tidemill.runtime.kv_cache import KVCache
from tidemill.runtime.loader import load_weights
from tidemill.runtime.rows import Rows
from tidemill.runtime.runner import Runner
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import ModelFiles


def build_runner(config: EngineConfig, on_progress: Callable[[str, int, int], None] | None = None) -> Runner:
    torch.set_num_threads(config.threads)
    place = Placement(getattr(torch, config.dtype), torch.device(config.device))
    checkpoint = open_checkpoint(ModelFiles(config.model_kind, Path(config.model_path), config.model_origin))
    shape = decoder_config(checkpoint.config)
    model = model_class(shape.architecture)(shape, config.max_model_len, place)
    load_weights(model, checkpoint, on_progress)
    cache = KVCache(shape.num_layers, config.num_blocks, config.block_size, shape.num_kv_heads, shape.head_dim, place)
    attention = PagedAttention(cache.layers, shape.windows, shape.head_dim**-0.5)
    rows = Rows(config.max_num_seqs, config.max_model_len, config.block_size, cache.padding_block)
    runner = Runner(model, cache, rows, attention, place.device)
    _warm_up(runner)
    return runner


def _warm_up(runner: Runner) -> None:
    """The first step creates thread pools and kernels; better here than in somebody's first token."""
    params = SamplingParams(max_tokens=1)
    runner.launch(Step(-1, [NewRow(0, [0], 1, params, 0, [], [])], [Slice(0, 0, 1, [0], True)])).result()
    runner.cache.wipe(torch.tensor([0], device=runner.device))


def resident_bytes() -> int:
    """What this process holds in memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
