"""Facts that planning needs without torch and execution needs with it, written in two rooms: they must stay equal."""

from __future__ import annotations

from tidemill import memory_parts
from tidemill.layers import attention
from tidemill.models.config import ACTIVATIONS
from tidemill.ops import reference
from tidemill.runtime import runner


def test_the_plan_counts_as_many_gathered_tokens_as_attention_gathers():
    assert memory_parts.GATHERED_TOKENS == attention.MAX_GATHERED_TOKENS


def test_the_plan_counts_as_many_scores_as_attention_holds():
    assert memory_parts.SCORES_BY_HAND == reference.TILE_NUMBERS


def test_the_plan_counts_as_many_prompt_positions_as_are_scored_together():
    assert memory_parts.PROMPT_LOGPROB_ROWS == runner.PROMPT_LOGPROB_ROWS


def test_every_activation_a_config_may_name_exists_and_the_other_way_round():
    assert set(ACTIVATIONS) == set(reference.ACTIVATIONS)
