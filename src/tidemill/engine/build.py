"""Puts an engine together from a resolved configuration. The one place of this room that loads torch."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.config import EngineConfig
from tidemill.engine.core import EngineCore


def build_core(config: EngineConfig, on_progress: Callable[[str, int, int], None] | None = None) -> EngineCore:
    from tidemill.runtime.build import build_runner

    runner = build_runner(config, on_progress)
    spec = runner.model.spec
    return EngineCore(config, runner, cache_regime=spec.regime, turn_length=spec.turn)
