"""Settings are resolved once, each value with its reason; what cannot work is refused by name, with what would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidemill.config import EngineArgs, EngineConfig, ModelFacts, activations, log_level, resolve
from tidemill.errors import ConfigError, OutOfMemory, StartupError
from tidemill.hardware import Hardware
from tidemill.models.registry import describe
from tidemill.precision import StoredWeights

GIB = 2**30
MACHINE = Hardware(
    cores=8,
    cores_why="cores this process may run on",
    memory_bytes=32 * GIB,
    available_bytes=16 * GIB,
    memory_why="memory of this machine",
    cpu_name="Some CPU",
    cpu_features=frozenset({"avx512_bf16"}),
)
OLD_CPU = replace(MACHINE, cpu_features=frozenset({"avx2"}))
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
FACTS = ModelFacts(
    path="/models/some",
    kind="folder",
    origin="some",
    shape=describe(RAW).shape,
    impl="native",
    impl_why="a native architecture",
    num_parameters=300_000_000,
    stored=StoredWeights("BF16"),
    eos_ids=(2, 99_999),
)
BLOCK = 16 * 2 * 16 * 4 * 64 * 2
"""Bytes of a block of this model in bfloat16: tokens, key and value, layers, heads, head size, element."""


def resolved(hardware: Hardware = MACHINE, facts: ModelFacts = FACTS, **args: Any) -> EngineConfig:
    return resolve(EngineArgs(**args), facts, hardware)


def refusal(hardware: Hardware = MACHINE, facts: ModelFacts = FACTS, **args: Any) -> StartupError:
    with pytest.raises(StartupError) as caught:
        resolved(hardware, facts, **args)
    return caught.value


def with_memory(gib: float) -> Hardware:
    return replace(MACHINE, available_bytes=int(gib * GIB))


def test_every_choice_comes_with_a_reason():
    config = resolved()
    chosen = {"device", "dtype", "threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens"}
    assert chosen | {"block_size", "num_blocks", "max_waiting"} <= set(config.why)
    assert all(config.why.values())


def test_what_was_asked_for_says_so():
    asked = {"threads": 3, "max_model_len": 1000, "max_num_seqs": 5, "max_num_batched_tokens": 700, "block_size": 32}
    config = resolved(**asked, max_waiting=7, dtype="float32", device="cpu")
    for name, value in asked.items():
        assert getattr(config, name) == value
        assert config.why[name] == "asked for"
    assert config.why["dtype"] == config.why["device"] == config.why["max_waiting"] == "asked for"


@pytest.mark.parametrize(
    ("hardware", "stored", "dtype", "words"),
    [
        (MACHINE, "BF16", "bfloat16", "hardware"),
        (MACHINE, "Q4_K", "bfloat16", "hardware"),
        (MACHINE, "F32", "float32", "as stored"),
        (OLD_CPU, "BF16", "float32", "no bfloat16"),
        (OLD_CPU, "F32", "float32", "no bfloat16"),
    ],
)
def test_auto_dtype_follows_the_cpu_and_the_file(hardware, stored, dtype, words):
    config = resolved(hardware, replace(FACTS, stored=StoredWeights(stored)))
    assert config.dtype == dtype
    assert words in config.why["dtype"]


def test_a_slow_dtype_is_obeyed_with_a_warning():
    config = resolved(OLD_CPU, dtype="bfloat16")
    assert config.dtype == "bfloat16"
    assert "slow" in config.why["dtype"]


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("float", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_spellings_of_dtypes(spelling, dtype):
    assert resolved(dtype=spelling).dtype == dtype


def test_the_cache_is_what_every_seat_needs_up_to_a_limit():
    few = resolved(max_num_seqs=2, max_model_len=160)
    assert few.num_blocks == 2 * 10
    assert "every seat" in few.why["num_blocks"]
    many = resolved(with_memory(100))
    assert many.kv_bytes <= 4 * GIB < many.kv_bytes + BLOCK
    assert "4 GiB" in many.why["num_blocks"]
    more = resolved(with_memory(100), gpu_memory_utilization=0.5)
    assert more.kv_bytes > 4 * GIB


def test_the_cache_takes_no_more_than_is_left():
    tight = resolved(with_memory(2.5))
    total = tight.kv_bytes + tight.weight_bytes + tight.activation_bytes
    assert total < 2.5 * GIB * 0.9
    assert "90% of memory of this machine" in tight.why["num_blocks"]
    tighter = resolved(with_memory(2.5), gpu_memory_utilization=0.6)
    assert tighter.kv_bytes < tight.kv_bytes


def test_a_cache_in_bytes_or_in_blocks():
    assert resolved(kv_cache_memory_bytes=100 * BLOCK + 5).num_blocks == 100
    config = resolved(num_gpu_blocks_override=7)
    assert (config.num_blocks, config.why["num_blocks"]) == (7, "asked for")


def test_a_model_longer_than_the_cache_is_shortened_with_a_reason():
    config = resolved(kv_cache_memory_bytes=100 * BLOCK)
    assert config.max_model_len == 1600
    assert "8192" in config.why["max_model_len"]


def test_a_length_that_was_asked_for_is_not_shortened():
    problem = refusal(kv_cache_memory_bytes=100 * BLOCK, max_model_len=2000)
    assert isinstance(problem, OutOfMemory)
    assert problem.param == "max_model_len"
    assert problem.fix == f"--max-model-len 1600, or --kv-cache-memory-bytes {125 * BLOCK}"
    fixed = resolved(kv_cache_memory_bytes=125 * BLOCK, max_model_len=2000)
    assert fixed.max_model_len == 2000


def test_a_fix_is_only_offered_if_it_would_help():
    problem = refusal(with_memory(1.2), max_model_len=8192)
    assert problem.fix is not None and "--kv-cache-memory-bytes" not in problem.fix
    length = int(problem.fix.removeprefix("--max-model-len "))
    assert resolved(with_memory(1.2), max_model_len=length).max_model_len == length


def test_a_cache_that_does_not_fit_is_refused_with_one_that_does():
    problem = refusal(kv_cache_memory_bytes=100 * GIB)
    assert isinstance(problem, OutOfMemory) and problem.cause is not None
    assert "16.00 GiB available" in problem.cause
    assert problem.fix is not None
    resolved(kv_cache_memory_bytes=int(problem.fix.removeprefix("--kv-cache-memory-bytes ")))

    problem = refusal(num_gpu_blocks_override=10**6)
    assert problem.fix is not None
    resolved(num_gpu_blocks_override=int(problem.fix.removeprefix("--num-gpu-blocks-override ")))


def test_a_model_that_does_not_fit_is_refused_with_the_sums():
    problem = refusal(with_memory(0.7))
    assert isinstance(problem, OutOfMemory)
    assert problem.cause is not None and "0.70 GiB available" in problem.cause
    assert refusal(with_memory(0.7), kv_cache_memory_bytes=GIB).message == problem.message


@pytest.mark.parametrize(
    "args",
    [
        {"max_model_len": 0},
        {"max_model_len": 1},
        {"max_model_len": 8193},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_num_batched_tokens": 100, "enable_chunked_prefill": False},
        {"block_size": -1},
        {"threads": 0},
        {"max_waiting": 0},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"gpu_memory_utilization": float("nan")},
        {"kv_cache_memory_bytes": 1},
        {"num_gpu_blocks_override": 0},
        {"num_gpu_blocks_override": 9, "kv_cache_memory_bytes": GIB},
        {"dtype": "float16"},
        {"dtype": "half"},
        {"dtype": "int3"},
        {"device": "cuda"},
        {"scheduling_policy": "lottery"},
        {"seed": 2**64},
    ],
    ids=str,
)
def test_refusals_name_the_field_and_the_fix(args):
    problem = refusal(**args)
    assert isinstance(problem, ConfigError)
    assert problem.param == next(iter(args))
    assert problem.fix


def test_without_chunked_prefill_a_step_holds_a_whole_prompt():
    config = resolved(enable_chunked_prefill=False)
    assert config.max_num_batched_tokens == config.max_model_len == 8192


def test_end_tokens_outside_the_vocabulary_are_dropped():
    assert resolved().eos_ids == [2]


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 32000,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}


def test_layers_with_a_window_keep_only_their_window_and_the_saving_is_told():
    """Gemma 3 has five local layers to a global one: at 8k it must hold three times what a plain cache does."""
    config = resolved(facts=replace(FACTS, shape=describe(GEMMA).shape), max_model_len=8192, max_num_batched_tokens=512)
    assert config.block_windows == [512] * 5 + [None]
    plain_request = 8192 * 18 * 2 * 256 * 2
    assert config.full_length_requests >= 3 * config.kv_bytes / plain_request
    assert config.cache_saving == pytest.approx(config.full_length_requests * plain_request / config.kv_bytes)
    assert "15 of 18 layers" in config.why["cache_saving"]


def test_a_context_longer_than_the_window_costs_only_the_layers_that_see_it():
    """What one more token costs at most: the three global layers' share."""
    facts = replace(FACTS, shape=describe(GEMMA).shape)
    short, long = (resolved(facts=facts, max_model_len=length, max_num_seqs=1) for length in (8192, 16384))
    assert long.kv_bytes - short.kv_bytes == 8192 * 3 * 2 * 256 * 2


def test_a_long_context_is_planned_with_the_masks_and_tables_it_needs():
    shape = describe({**GEMMA, "max_position_embeddings": 131072}).shape
    config = resolved(facts=replace(FACTS, shape=shape))
    assert config.max_model_len == 131072
    assert config.activation_bytes == activations(shape, config.max_num_batched_tokens, 64, 131072, 2)
    tables = 4 * 2 * 256 * 131072
    assert config.activation_bytes > tables + 3 * 512 * 131072
    small = resolved(with_memory(2.1), facts=replace(FACTS, shape=shape))
    assert small.max_model_len < 131072
    spent = small.weight_bytes + small.activation_bytes + small.kv_bytes
    assert spent <= 0.9 * 2.1 * GIB


def test_the_longest_context_that_fits_is_found_with_windows_too():
    facts = replace(FACTS, shape=describe(GEMMA).shape)
    config = resolved(facts=facts, num_gpu_blocks_override=1000)
    asked = resolved(facts=facts, num_gpu_blocks_override=1000, max_model_len=config.max_model_len)
    assert asked.full_length_requests >= 1.0
    problem = refusal(facts=facts, num_gpu_blocks_override=1000, max_model_len=config.max_model_len + 1)
    assert f"--max-model-len {config.max_model_len}" in problem.fix


def test_the_log_level_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("TIDEMILL_LOG_LEVEL", raising=False)
    assert log_level() == "WARNING"
    monkeypatch.setenv("TIDEMILL_LOG_LEVEL", "debug")
    assert log_level() == "DEBUG"
    monkeypatch.setenv("TIDEMILL_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="loud"):
        log_level()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", "no"),
        ("check_weights", 1),
        ("max_model_len", "8k"),
        ("max_num_seqs", True),
        ("dtype", None),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(ConfigError) as caught:
        EngineArgs(**{name: value})
    assert caught.value.param == name
