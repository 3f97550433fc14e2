"""Any causal language model of transformers, run by transformers' own code over this engine's paged cache.

The model is a transformers object; only its attention is ours (`fallback_attention.py`). Its decoder runs over one
ragged batch as if that were one long sequence, told by position ids where each token stands. Slower than a native
model, and refused rather than wrong: what it computes is compared with transformers itself when it is loaded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tidemill.errors import BadCheckpoint
from tidemill.layers.attention import PagedAttention
from tidemill.layers.parameter import Placement
from tidemill.models.fallback_attention import AttentionSeam, first_line
from tidemill.models.fallback_check import check
from tidemill.models.fallback_rope import separate_sequences
from tidemill.models.fallback_shape import describe_transformers

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


class TransformersModel:
    """What `decoder.py` is to native models: hidden states of a step's tokens, and the scores they give."""

    def __init__(
        self, folder: Path, place: Placement, *, trust_remote_code: bool = False, on_progress: Progress | None = None
    ) -> None:
        self.spec = describe_transformers(folder, trust_remote_code)
        self._seam = AttentionSeam(len(self.spec.shape.caches))
        self.model = _load(folder, place, self._seam.name, trust_remote_code, on_progress)
        separate_sequences(self.model, self._seam)
        self._decoder = self.model.get_submodule(self.spec.decoder)
        self._computed = _Computed()
        self._head = _replaced(self.model, self.spec.decoder, self._computed)
        check(self, self.spec.shape, place)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        with self._seam.over(attention, lengths):
            output = self._decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        self._computed.kind = type(output)
        return output[0][0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's own way from hidden states to scores: head, scale, soft cap and whatever else it has."""
        self._computed.hidden = hidden[None]
        rows = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        return self._head(input_ids=rows, use_cache=False).logits[0].float().contiguous()


class _Computed(torch.nn.Module):
    """Stands in the place of the decoder, when what it would compute is known already."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None
        self.kind: type = tuple

    def forward(self, *_: Any, **__: Any) -> Any:
        return (self.hidden,) if self.kind is tuple else self.kind(last_hidden_state=self.hidden)


def _replaced(model: torch.nn.Module, path: str, part: torch.nn.Module) -> torch.nn.Module:
    """The model with another part at this path. Everything else is shared, and the model itself stays as it is."""
    name, _, rest = path.partition(".")
    twin = copy.copy(model)
    child = model.get_submodule(name)
    twin._modules = {**model._modules, name: _replaced(child, rest, part) if rest else part}
    return twin


def _load(
    folder: Path, place: Placement, attention: str, trust_remote_code: bool, on_progress: Progress | None
) -> torch.nn.Module:
    if on_progress is not None:
        on_progress("loading weights", 0, 1)
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=place.dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            # What does not fit is told by name below.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise
        raise BadCheckpoint(
            f"transformers cannot load the weights in {folder}",
            cause=first_line(error),
            fix="fetch the checkpoint again; config.json and the weights must belong together",
        ) from error
    finally:
        if shows_progress:
            transformers_logging.enable_progress_bar()
    model, found = loaded
    _check(folder, found)
    if on_progress is not None:
        on_progress("loading weights", 1, 1)
    return model.to(place.device).eval().requires_grad_(False)


def _check(folder: Path, found: dict[str, Any]) -> None:
    """transformers fills what a checkpoint lacks with random numbers; here that is an error."""
    if missing := sorted(found["missing_keys"]):
        raise BadCheckpoint(
            f"{folder} has no tensor {missing[0]}, which its config asks for",
            cause=f"{len(missing)} tensors are missing",
            fix="fetch the checkpoint again, or correct config.json",
        )
    if misfits := sorted(found["mismatched_keys"]):
        name, stored, wanted = misfits[0]
        raise BadCheckpoint(
            f"{folder}: tensor {name} has shape {tuple(stored)}, the config makes it {tuple(wanted)}",
            fix="config.json and the weights belong to different models: fetch both again",
        )
    if unused := sorted(found["unexpected_keys"]):
        logger.warning("%d tensors of %s are not used, such as %s", len(unused), folder, unused[0])
