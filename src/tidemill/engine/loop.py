"""The engine's life: take messages, run steps, emit outputs; sleep when there is nothing to do.

The same loop runs in a process of its own and in a thread; `inbox` and `emit` are all it knows of the outside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from tidemill.engine.core import EngineCore
from tidemill.engine.messages import Abort, Add, Outputs, Ping, Pong, SequenceOutput
from tidemill.errors import TidemillError

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    def take(self, block: bool) -> list[Any] | None:
        """All messages that have arrived, waiting for one if `block`; None when the other side is gone."""


def run_loop(core: EngineCore, inbox: Inbox, emit: Callable[[Any], None]) -> None:
    while (messages := inbox.take(block=not core.has_work)) is not None:
        outputs: list[SequenceOutput] = []
        for message in messages:
            if isinstance(message, Add):
                outputs.extend(_added(core, message))
            elif isinstance(message, Abort):
                core.abort(message.ids)
            elif isinstance(message, Ping):
                emit(Pong())
        if core.has_work:
            outputs.extend(core.step())
        if outputs or messages:
            emit(Outputs(outputs, core.stats))


def _added(core: EngineCore, message: Add) -> list[SequenceOutput]:
    """Nothing a single request holds may end the engine, and with it the requests of others."""
    try:
        core.add(message)
        return []
    except Exception as error:
        logger.exception("a request could not be taken")
        problem = TidemillError("the engine could not take this request", cause=f"{type(error).__name__}: {error}")
        return [SequenceOutput(message.id, [], "error", problem=problem.as_dict())]
