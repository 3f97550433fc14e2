"""The shape of one step as a GPU needs it: small tensors on the device, and the few numbers a launch depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceBatch:
    """Sequences that bring one token come first. A sequence's tokens are the last of its context.

    A padded batch ends with decoding sequences whose context length is 0 and whose slot is negative: nothing is read or
    stored for them.
    """

    rows: torch.Tensor
    """int32 [sequences]: where each stands in the tables."""
    query_starts: torch.Tensor
    """int32 [sequences + 1]: where the tokens of each begin in the batch."""
    context_lens: torch.Tensor
    """int32 [sequences], the step's tokens included."""
    tables: Sequence[torch.Tensor]
    """Per group of layers, int32 [rows, blocks]: pages."""
    slots: Sequence[torch.Tensor]
    """Per group of layers, int64 [tokens]: flat cache positions."""
    num_decode: int
    max_query_len: int
    num_tokens: int
