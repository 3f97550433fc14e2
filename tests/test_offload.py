"""Layers in host memory compute what layers on the device compute, and take as little of the device as was planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import write_checkpoint
from tidemill.layers.parameter import Placement
from tidemill.models.count import count_weights
from tidemill.models.decoder import Decoder
from tidemill.models.registry import describe
from tidemill.plan.offload import plan_offload
from tidemill.quant.packing import DENSE, Packing
from tidemill.quant.scheme import INT8, Scheme
from tidemill.runtime.loader import fill_dummy, load_weights
from tidemill.runtime.offload import ALIGNMENT, Arena, Conveyor, Offload
from tidemill.weights.checkpoint import Checkpoint, open_checkpoint
from tidemill.weights.location import ModelFiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACE = Placement(torch.float32, DEVICE)
FAMILIES = {
    "plain": ("Llama", {"num_hidden_layers": 5}),
    "learned positions": ("GPT2", {"n_embd": 48, "n_layer": 5, "n_head": 4, "n_positions": 64}),
    "experts": ("Mixtral", {"num_hidden_layers": 5, "num_local_experts": 4}),
}


class NoCache:
    """In place of attention: every token sees itself, more of itself in later layers."""

    fuses = False

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, *_: Any, **__: Any) -> torch.Tensor:
        return (v * (1 + layer)).repeat_interleave(q.shape[1] // v.shape[1], dim=1)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    family, changes = FAMILIES[request.param]
    write_checkpoint(folder, family, **changes)
    return open_checkpoint(ModelFiles("folder", folder, "tiny"))


def loaded(checkpoint: Checkpoint, offloaded: int, scheme: Scheme | None = None) -> Decoder:
    place = replace(PLACE, packing=DENSE if scheme is None else Packing(scheme))
    model = Decoder(describe(checkpoint.config), 64, place, Offload(offloaded).make_layer)
    load_weights(model, checkpoint, device=DEVICE)
    return model


@torch.no_grad()
def scores(model: Decoder, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor(tokens, device=DEVICE)
    positions = torch.arange(len(tokens), device=DEVICE)
    lengths = torch.full_like(positions, len(tokens))
    return model.logits(model.forward(ids, positions, lengths, NoCache())).cpu()  # type: ignore[arg-type]


@pytest.mark.parametrize("offloaded", [1, 2, 3, 5])
def test_the_same_logits_step_after_step(checkpoint, offloaded):
    plain, streamed = loaded(checkpoint, 0), loaded(checkpoint, offloaded)
    for tokens in ([3, 1, 4], [1], [5, 9, 2, 6], [5, 3]):
        torch.testing.assert_close(scores(streamed, tokens), scores(plain, tokens))


def test_packed_weights_pass_through_as_they_are(checkpoint):
    plain, streamed = loaded(checkpoint, 0, INT8), loaded(checkpoint, 3, INT8)
    torch.testing.assert_close(scores(streamed, [3, 1, 4]), scores(plain, [3, 1, 4]))


def test_a_step_that_ended_in_the_middle_disturbs_nobody(checkpoint):
    plain, streamed = loaded(checkpoint, 0), loaded(checkpoint, 4)
    whole = streamed.layers
    for stopping in (2, 3, 4):
        streamed.layers = whole[:stopping]
        scores(streamed, [7, 7])
        streamed.layers = whole
        torch.testing.assert_close(scores(streamed, [2, 7, 1]), scores(plain, [2, 7, 1]))


def test_all_of_an_offloaded_layer_is_in_host_memory(checkpoint):
    model = loaded(checkpoint, 2)
    for layer in model.layers[-2:]:
        storages = {parameter.target.untyped_storage().data_ptr() for parameter in layer.parameters()}
        assert {parameter.target.device.type for parameter in layer.parameters()} == {"cpu"}
        assert len(storages) == 1


@pytest.mark.skipif(DEVICE.type != "cuda", reason="measures a GPU's memory")
def test_the_device_holds_less_by_what_was_planned():
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 4096}
    raw |= {"num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 1000}
    spec = describe(raw | {"max_position_embeddings": 64})
    layers = [layer.nbytes(4) for layer in count_weights(spec).layers]
    plan = plan_offload(layers, 8 * layers[0])
    held = []
    for count in (0, plan.layers):
        before = torch.cuda.memory_allocated()
        model = Decoder(spec, 64, PLACE, Offload(count).make_layer)
        fill_dummy(model, PLACE)
        held.append(torch.cuda.memory_allocated() - before)
        del model
    assert held[0] - held[1] == pytest.approx(plan.host_bytes - plan.staging_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("wanted", "layers", "host", "staging"),
    [(0, 0, 0, 0), (1, 3, 90, 80), (10, 3, 90, 80), (11, 4, 100, 80), (1000, 4, 100, 80)],
)
def test_the_fewest_last_layers_that_free_as_much(wanted, layers, host, staging):
    plan = plan_offload([10, 20, 30, 40], wanted)
    assert (plan.layers, plan.host_bytes, plan.staging_bytes) == (layers, host, staging)


def test_an_arena_measures_what_it_would_hand_out():
    shapes = [((3, 5), torch.float32), ((), torch.bfloat16), ((700,), torch.uint8), ((2, 2), torch.float64)]
    measuring = Arena()
    assert all(measuring.take(*wanted).is_meta for wanted in shapes)
    giving = Arena(torch.zeros(measuring.used, dtype=torch.uint8))
    for number, (shape, dtype) in enumerate(shapes, 1):
        tensor = giving.take(shape, dtype)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert not tensor.any(), "no two share memory"
        assert (tensor.data_ptr() - giving.buffer.data_ptr()) % ALIGNMENT == 0
        tensor.fill_(number)
    assert giving.used == measuring.used


def test_layers_come_in_turn_over_any_number_of_slots():
    hosts = [torch.full((8,), number, dtype=torch.uint8) for number in range(3)]
    slots = [torch.empty(8, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    conveyor = Conveyor(hosts, slots, DEVICE)
    for _ in range(3):
        for layer in range(3):
            slot = conveyor.arrive(layer)
            assert slots[slot].tolist() == [layer] * 8
            conveyor.leave(layer)
