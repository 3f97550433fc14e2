"""Puts an engine together from a resolved configuration. The one place of this room that loads torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from tidemill.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.cuda import device_problem, missing_settings

logger = logging.getLogger(__name__)
GIB = 2**30


def build_core(config: EngineConfig, on_progress: Callable[[str, int, int], None] | None = None) -> EngineCore:
    if config.device == "cuda":
        # Read when torch and CUDA start, which is now unless the caller has started them.
        os.environ.update(missing_settings(os.environ))
    from tidemill.runtime.build import build_runner, device_bytes

    try:
        runner = build_runner(config, on_progress)
    except Exception as error:
        if problem := device_problem(error):
            raise problem from error
        raise
    if config.device == "cuda":
        parts = {**config.plan, "KV cache": config.kv_bytes}
        planned = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        logger.info("GiB of the GPU: planned %s; held now %.2f", planned, device_bytes() / GIB)
    spec = runner.model.spec
    return EngineCore(
        config,
        runner,
        cache_regime=spec.regime,
        turn_length=spec.turn,
        steps_in_flight=runner.steps_in_flight,
    )
