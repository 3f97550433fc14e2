"""What a server serves: models by name, each with its engine. Routes a name, or says which names there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.engine.client import EngineClient
from tidemill.errors import ModelNotServed
from tidemill.text.chat import ChatTemplate
from tidemill.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    names: tuple[str, ...]
    root: str
    created: int
    max_model_len: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    client: EngineClient
    default_sampling: Mapping[str, Any]
    """Sampling values of the model's generation_config, used where a request says nothing."""


class Host:
    def __init__(self, models: list[ServedModel]) -> None:
        self.models = models

    def find(self, name: str | None) -> ServedModel:
        """The model of that name; None means the first one."""
        if name is None:
            return self.models[0]
        for model in self.models:
            if name in model.names:
                return model
        served = ", ".join(alias for model in self.models for alias in model.names)
        raise ModelNotServed(
            f"the model {name!r} is not served here; served are: {served}", param="model", fix=f"use one of: {served}"
        )
