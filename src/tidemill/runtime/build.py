"""Builds a runner from a resolved configuration: model, weights, cache, rows, and one step to warm everything up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tidemill.config import EngineConfig
from tidemill.core.params import SamplingParams
from tidemill.core.step import NewRow, Slice, Step
from tidemill.layers.attention import PagedAttention
from tidemill.layers.parameter import Placement
from tidemill.models.decoder import Decoder
from tidemill.models.names import stored_names, with_stored_head
from tidemill.models.registry import describe
from tidemill.runtime.kv_cache import KVCache
from tidemill.runtime.loader import check_stored, load_weights, with_own_head
from tidemill.runtime.rows import Rows
from tidemill.runtime.runner import Runner
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import ModelFiles
from tidemill.weights.renamed import RenamedCheckpoint

if TYPE_CHECKING:
    from tidemill.models.fallback import TransformersModel

Progress = Callable[[str, int, int], None]


def build_runner(config: EngineConfig, on_progress: Progress | None = None) -> Runner:
    torch.set_num_threads(config.threads)
    place = Placement(getattr(torch, config.dtype), torch.device(config.device))
    load = _native if config.model_impl == "native" else _through_transformers
    model = load(config, place, on_progress)
    layout = model.spec.shape.layout
    cache = KVCache(layout, config.num_blocks, config.block_size, place)
    attention = PagedAttention(cache.slots, layout, model.spec.alibi)
    rows = Rows(config.max_num_seqs, config.max_model_len, config.block_size, cache.padding_block, len(layout.windows))
    runner = Runner(model, cache, rows, attention, place.device)
    _warm_up(runner)
    return runner


def _native(config: EngineConfig, place: Placement, on_progress: Progress | None) -> Decoder:
    checkpoint = open_checkpoint(ModelFiles(config.model_kind, Path(config.model_path), config.model_origin))
    spec = describe(checkpoint.config)
    if (names := stored_names(spec, checkpoint.tensors)) is not None:
        checkpoint = RenamedCheckpoint(checkpoint, names)
    spec = with_own_head(with_stored_head(spec, checkpoint.tensors), checkpoint)
    model = Decoder(spec, config.max_model_len, place)
    load_weights(model, checkpoint, on_progress, check=config.check_weights)
    return model


def _through_transformers(config: EngineConfig, place: Placement, on_progress: Progress | None) -> TransformersModel:
    # Importing transformers' models takes seconds that a native one need not wait for.
    from tidemill.models.fallback import TransformersModel

    folder = Path(config.model_path)
    if config.check_weights:
        check_stored(open_checkpoint(ModelFiles(config.model_kind, folder, config.model_origin)), on_progress)
    return TransformersModel(folder, place, trust_remote_code=config.trust_remote_code, on_progress=on_progress)


def _warm_up(runner: Runner) -> None:
    """The first step creates thread pools and kernels; better here than in somebody's first token."""
    params = SamplingParams(max_tokens=1)
    blocks = [[0] for _ in runner.rows.tables]
    runner.launch(Step(-1, [NewRow(0, [0], 1, params, 0, [], [])], [Slice(0, 0, 1, blocks, True)])).result()
    runner.cache.wipe(torch.tensor([0], device=runner.device))


def resident_bytes() -> int:
    """What this process holds in memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
