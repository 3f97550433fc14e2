"""A step's inputs, gathered on the device, against their specification."""

from __future__ import annotations

import pytest
import torch

from tidemill.ops import reference
from tidemill.ops.triton import step_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("groups", [1, 3])
def test_inputs_are_gathered_from_rows(groups):
    torch.manual_seed(groups)
    tokens = torch.randint(0, 1000, (9, 33), dtype=torch.int32, device=DEVICE)
    tables = torch.randint(-1, 50, (groups, 9, 8), dtype=torch.int32, device=DEVICE)
    least = torch.randint(0, 40, (9,), dtype=torch.int32, device=DEVICE)
    rows = torch.randint(0, 8, (200,), dtype=torch.int32, device=DEVICE)
    ends = torch.randint(0, 33, (200,), dtype=torch.int32, device=DEVICE)
    expected = reference.gather_inputs(tokens, tables, least, rows, ends, 4)
    found = step_inputs.gather_inputs(tokens, tables, least, rows, ends, 4)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert (expected[1][:, ends == 0] == -1).all()
