"""Builds a runner from a resolved configuration: model, weights, cache, rows, and one step to warm everything up."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tidemill.config import EngineConfig
from tidemill.core.params import SamplingParams
from tidemill.core.step import NewRow, Slice, Step
from tidemill.layers.attention import PagedAttention
from tidemill.layers.parameter import Placement
from tidemill.models.decoder import Decoder
from tidemill.models.names import stored_names, with_stored_head
from tidemill.models.registry import describe
from tidemill.ops import kernels
from tidemill.precision import cpu_packing, gpu_packing
from tidemill.quant.packing import DENSE, Packing
from tidemill.quant.scheme import SCHEMES
from tidemill.runtime.kv_cache import KVCache
from tidemill.runtime.loader import check_stored, fill_dummy, load_weights, with_own_head
from tidemill.runtime.offload import Offload
from tidemill.runtime.rows import Rows
from tidemill.runtime.runner import Runner
from tidemill.weights.checkpoint import Checkpoint, open_checkpoint
from tidemill.weights.dummy import open_for
from tidemill.weights.location import ModelFiles
from tidemill.weights.renamed import RenamedCheckpoint

if TYPE_CHECKING:
    from tidemill.models.fallback import TransformersModel
    from tidemill.runtime.device_runner import DeviceRunner

CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Types of the KV cache that may be narrower than the model's."""
Progress = Callable[[str, int, int], None]


def build_runner(config: EngineConfig, on_progress: Progress | None = None) -> Runner | DeviceRunner:
    torch.set_num_threads(config.threads)
    place = Placement(getattr(torch, config.dtype), _device(config))
    load = _native if config.model_impl == "native" else _through_transformers
    model = load(config, place, on_progress)
    if place.device.type == "cuda" or kernels.FORCED:
        return _on_device(config, model, place, on_progress)
    layout = model.spec.shape.layout
    cache = KVCache(layout, config.num_blocks, config.block_size, place, _stored_cache(config))
    attention = PagedAttention(cache.slots, layout, model.spec.alibi, cache.scales, place.dtype)
    rows = Rows(config.max_num_seqs, config.max_model_len, config.block_size, cache.padding_block, len(layout.windows))
    runner = Runner(model, cache, rows, attention, place.device)
    _warm_up(runner)
    return runner


def _device(config: EngineConfig) -> torch.device:
    if config.device != "cuda":
        return torch.device(config.device)
    torch.cuda.set_device(config.device_index)
    return torch.device("cuda", config.device_index)


def _stored_cache(config: EngineConfig) -> torch.dtype | None:
    """What the cache's numbers are narrowed to; None: they are kept as computed."""
    return None if config.kv_cache_dtype == config.dtype else CACHE_DTYPES.get(config.kv_cache_dtype)


def _on_device(config: EngineConfig, model: Any, place: Placement, on_progress: Progress | None) -> DeviceRunner:
    # Triton is there where torch was built for a GPU; other machines need not have it.
    from tidemill.layers.triton_attention import TritonAttention
    from tidemill.runtime.device_rows import DeviceRows
    from tidemill.runtime.device_runner import DeviceRunner

    layout = model.spec.shape.layout
    cache = KVCache(layout, config.num_blocks, config.block_size, place, _stored_cache(config))
    attention = TritonAttention(cache.slots, layout, model.spec.alibi, cache.scales, place.dtype)
    num_groups = len(layout.windows)
    rows = DeviceRows(config.max_num_seqs, config.max_model_len, config.block_size, num_groups, place.device)
    runner = DeviceRunner(model, cache, rows, attention, place.device, config.vocab_size)
    _warm_up_device(runner)
    if config.graph_sizes and place.device.type == "cuda":
        runner.capture(config.graph_sizes, on_progress)
    return runner


def _native(config: EngineConfig, place: Placement, on_progress: Progress | None) -> Decoder:
    files = ModelFiles(config.model_kind, Path(config.model_path), config.model_origin)
    checkpoint = open_for(files, config.load_format)
    spec = describe(checkpoint.config)
    if checkpoint.tensors:
        if (names := stored_names(spec, checkpoint.tensors)) is not None:
            checkpoint = RenamedCheckpoint(checkpoint, names)
        spec = with_own_head(with_stored_head(spec, checkpoint.tensors), checkpoint)
    place = replace(place, packing=_packing(config, checkpoint, place.device))
    model = Decoder(spec, config.max_model_len, place, Offload(config.offload_layers).make_layer)
    if config.load_format == "dummy":
        fill_dummy(model, place, on_progress)
    else:
        load_weights(model, checkpoint, on_progress, check=config.check_weights, device=place.device)
    return model


def _packing(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> Packing:
    """As `config` counted on when it planned."""
    if config.quantization is None:
        return DENSE
    choose = gpu_packing if device.type == "cuda" or kernels.FORCED else cpu_packing
    if config.quantization == "stored":
        return choose(None, checkpoint.schemes)
    return choose(SCHEMES[config.quantization], {})


def _through_transformers(config: EngineConfig, place: Placement, on_progress: Progress | None) -> TransformersModel:
    # Importing transformers' models takes seconds that a native one need not wait for.
    from tidemill.models.fallback import TransformersModel

    folder = Path(config.model_path)
    if config.check_weights:
        check_stored(open_checkpoint(ModelFiles(config.model_kind, folder, config.model_origin)), on_progress)
    return TransformersModel(folder, place, trust_remote_code=config.trust_remote_code, on_progress=on_progress)


def _warm_up_device(runner: DeviceRunner) -> None:
    """A prompt of two tokens, and its second one again: compiles the kernels of both kinds of steps. What it leaves
    in the cache is never read, for kernels do not touch what a sequence does not see."""
    params = SamplingParams(max_tokens=2)
    blocks = [[0] for _ in runner.rows.tables]
    no_blocks: list[list[int]] = [[] for _ in runner.rows.tables]
    runner.launch(Step(-2, [NewRow(0, [0, 0], 2, params, 0, [], [])], [Slice(0, 0, 2, blocks, True)])).result()
    runner.launch(Step(-1, [], [Slice(0, 1, 1, no_blocks, True)])).result()


def _warm_up(runner: Runner) -> None:
    """The first step creates thread pools and kernels; better here than in somebody's first token."""
    params = SamplingParams(max_tokens=1)
    blocks = [[0] for _ in runner.rows.tables]
    runner.launch(Step(-1, [NewRow(0, [0], 1, params, 0, [], [])], [Slice(0, 0, 1, blocks, True)])).result()
    runner.cache.wipe(torch.tensor([0], device=runner.device))


def device_bytes() -> int:
    """What tensors of this process hold of a GPU, together with what torch keeps for them."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


def resident_bytes() -> int:
    """What this process holds in memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
