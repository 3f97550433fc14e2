"""Loading with `check=True` looks at every number and names the tensor that is not one."""

import pytest
import torch
from safetensors.torch import save_file

from tidemill.errors import BadCheckpoint
from tidemill.layers.parameter import Parameter
from tidemill.runtime.loader import load_weights
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import ModelFiles


class Model:
    """Two parameters in the precision it runs in, and counters that are no floats."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.targets = {
            "a.weight": torch.empty(3, 4, dtype=dtype),
            "b.weight": torch.empty(5, dtype=dtype),
            "ids": torch.empty(2, dtype=torch.int64),
        }

    def parameters(self):
        return iter([Parameter(name, target) for name, target in self.targets.items()])


@pytest.fixture
def write(tmp_path):
    def write(**tensors: torch.Tensor):
        (tmp_path / "config.json").write_text("{}")
        whole = {"a.weight": torch.ones(3, 4), "b.weight": torch.ones(5), "ids": torch.arange(2)}
        save_file(
            whole | {name.replace("_", "."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
        )
        return open_checkpoint(ModelFiles("folder", tmp_path, "m"))

    return write


def test_finite_weights_pass_and_are_loaded(write):
    model = Model()
    load_weights(model, write(), check=True)
    assert torch.equal(model.targets["b.weight"], torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_file_the_tensor_and_the_number_of_values_are_named(write, dtype):
    broken = torch.ones(5)
    broken[1], broken[3] = torch.nan, torch.nan
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: 2 of 5 values of tensor b\.weight are NaN") as caught:
        load_weights(Model(), write(b_weight=broken.to(dtype)), check=True)
    assert caught.value.fix


def test_infinity_counts_too(write):
    with pytest.raises(BadCheckpoint, match=r"12 of 12 values of tensor a\.weight"):
        load_weights(Model(), write(a_weight=torch.full((3, 4), -torch.inf)), check=True)


def test_a_value_too_large_for_the_precision_is_the_precisions_fault(write):
    with pytest.raises(BadCheckpoint, match=r"1 of 5 values of tensor b\.weight do not fit in float16") as caught:
        load_weights(Model(torch.float16), write(b_weight=torch.tensor([1, 2, 3, 4, 1e6])), check=True)
    assert "--dtype bfloat16" in caught.value.fix


def test_nothing_is_looked_at_unless_asked(write):
    model = Model()
    load_weights(model, write(b_weight=torch.full((5,), torch.nan)))
    assert model.targets["b.weight"].isnan().all()
