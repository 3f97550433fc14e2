"""Checkpoints that call a decoder's tensors by another prefix are found by their embedding."""

from __future__ import annotations

from tidemill.models.names import stored_names
from tidemill.models.registry import describe

LLAMA = describe(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
)
NORM = "layers.0.input_layernorm.weight"


def test_names_as_the_architecture_gives_them_stay():
    assert stored_names(LLAMA, ["model.embed_tokens.weight", f"model.{NORM}", "lm_head.weight"]) is None


def test_a_base_model_without_its_name_in_front():
    names = stored_names(LLAMA, ["embed_tokens.weight", NORM, "lm_head.weight"])
    assert names == {
        "model.embed_tokens.weight": "embed_tokens.weight",
        f"model.{NORM}": NORM,
        "lm_head.weight": "lm_head.weight",
    }


def test_the_text_part_of_a_larger_model_in_both_spellings_and_nothing_else_of_it():
    for inside, head in (("language_model.model.", "language_model."), ("model.language_model.", "")):
        stored = [f"{inside}embed_tokens.weight", f"{inside}{NORM}", f"{head}lm_head.weight", "vision_tower.x.weight"]
        assert stored_names(LLAMA, stored) == {
            "model.embed_tokens.weight": stored[0],
            f"model.{NORM}": stored[1],
            "lm_head.weight": stored[2],
        }


def test_two_candidates_are_not_guessed_between():
    assert stored_names(LLAMA, ["a.embed_tokens.weight", "b.embed_tokens.weight"]) is None
