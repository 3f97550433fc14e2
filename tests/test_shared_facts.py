"""Facts that planning needs without torch and execution needs with it, written in two rooms: they must stay equal."""

from __future__ import annotations

from tidemill.layers import attention
from tidemill.models.config import ACTIVATIONS
from tidemill.ops import reference
from tidemill.plan import parts
from tidemill.runtime import device_runner, scores


def test_the_plan_counts_as_many_gathered_tokens_as_attention_gathers():
    assert parts.GATHERED_TOKENS == attention.MAX_GATHERED_TOKENS


def test_the_plan_counts_as_many_scores_as_attention_holds():
    assert parts.SCORES_BY_HAND == reference.TILE_NUMBERS


def test_the_plan_counts_as_many_prompt_positions_as_are_scored_together():
    assert parts.SCORED_AT_ONCE == scores.SCORED_AT_ONCE


def test_the_plan_counts_the_logits_that_graphs_keep():
    assert parts.GRAPH_LOGIT_ROWS == device_runner.FEW_SEQUENCES


def test_every_activation_a_config_may_name_exists_and_the_other_way_round():
    assert set(ACTIVATIONS) == set(reference.ACTIVATIONS)
