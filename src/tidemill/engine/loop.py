"""The engine's life: take messages, run steps, emit outputs; sleep when there is nothing to do.

The same loop runs in a process of its own and in a thread; `inbox` and `emit` are all it knows of the outside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from tidemill.engine.core import EngineCore
from tidemill.engine.messages import Abort, Add, Outputs, Ping, Pong, SequenceOutput

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    def take(self, block: bool) -> list[Any] | None:
        """All messages that have arrived, waiting for one if `block`; None when the other side is gone."""


def run_loop(core: EngineCore, inbox: Inbox, emit: Callable[[Any], None]) -> None:
    while (messages := inbox.take(block=not core.has_work)) is not None:
        outputs: list[SequenceOutput] = []
        for message in messages:
            if isinstance(message, Add):
                core.add(message)
            elif isinstance(message, Abort):
                core.abort(message.ids)
            elif isinstance(message, Ping):
                emit(Pong(message.nonce))
        if core.has_work:
            outputs = core.step()
        if outputs or messages:
            emit(Outputs(outputs, core.stats))
