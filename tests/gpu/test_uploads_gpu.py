"""What is sent arrives as it was when it was sent, however far the device is behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tidemill.runtime.uploads import BUFFERS, Uploads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_no_buffer_is_filled_again_before_its_copy_has_run():
    uploads = Uploads(torch.device("cuda"))
    torch.cuda._sleep(200_000_000)
    sent = [uploads.send([np.full(1000, number, np.int32)])[0] for number in range(3 * BUFFERS)]
    assert [int(tensor.unique()) for tensor in sent] == list(range(3 * BUFFERS))
