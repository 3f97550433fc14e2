"""`tidemill models support`: how a checkpoint would run, from its config alone, without weights."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tests.helpers.checkpoints import TINY
from tidemill.cli.models import command


def look(folder, config, *flags):
    (folder / "config.json").write_text(json.dumps({**TINY, **config}))
    return CliRunner().invoke(command, ["support", str(folder), *flags])


def test_a_native_architecture_names_its_family_and_its_cache(tmp_path):
    config = {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    said = look(tmp_path, config)
    assert said.exit_code == 0
    assert "native" in said.output and "models/llama.py: Mistral 7B" in said.output
    assert "3 of 3 layers keep the last 16 tokens" in said.output and "128 tokens" in said.output


def test_what_transformers_runs_says_so(tmp_path):
    said = look(tmp_path, {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, "--json")
    (row,) = json.loads(said.stdout)
    assert row["runs"] == "transformers" and "fallback" in row["note"]
    assert row["layers"] == 3 and row["cache_bytes_per_token"] == 3 * 2 * 2 * 12 * 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "state"),
        ({"architectures": ["UnheardOfForCausalLM"], "model_type": "unheard-of"}, "unheard-of"),
        ({"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 3}, "3 key/value heads"),
    ],
    ids=["stateful", "unknown", "contradictory"],
)
def test_what_cannot_run_gives_the_reason_and_a_way_out(tmp_path, config, reason):
    said = look(tmp_path, config)
    assert said.exit_code == 1
    assert reason in said.output and "fix" in said.output
