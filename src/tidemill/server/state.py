"""What the routes of one app share: the engines behind it, its settings, its metrics and a few threads.

The only thing that changes after start is `draining`, which the runner sets when it was told to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from tidemill.errors import ShuttingDown
from tidemill.server.metrics import Metrics
from tidemill.server.settings import ServerSettings

if TYPE_CHECKING:
    from tidemill.engine.client import EngineClient
    from tidemill.engine.host import Host

T = TypeVar("T")

# Below this many characters, tokenising takes less time than handing the text to a thread and back.
INLINE_CHARS = 4096


@dataclass(slots=True)
class AppState:
    host: Host
    settings: ServerSettings
    metrics: Metrics
    draining: bool = False
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=2, thread_name_prefix="tidemill-text")
    )

    @property
    def fingerprint(self) -> str:
        return self.settings.system_fingerprint or f"tidemill-{self.settings.version}"

    @property
    def clients(self) -> list[EngineClient]:
        """Each engine once, also where several served models share one."""
        return list({id(model.client): model.client for model in self.host.models}.values())

    def check_health(self) -> None:
        """Raises ShuttingDown, EngineDead or EngineStalled."""
        self.refuse_when_draining()
        for client in self.clients:
            client.check_health()

    def refuse_when_draining(self) -> None:
        if self.draining:
            raise ShuttingDown("the server is shutting down and takes no new requests", fix="retry on another replica")

    async def off_loop(self, work: Callable[[], T], num_chars: int) -> T:
        """Runs text work without holding up the other connections when there is much text."""
        return work() if num_chars <= INLINE_CHARS else await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)
