"""Settings on a GPU: which device, which precision, and how its memory is divided before any of it is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.toy import ask, toy_core
from tidemill.config import EngineArgs, EngineConfig, ModelFacts, resolve
from tidemill.engine.cuda import context_lost, device_problem, missing_settings
from tidemill.errors import ConfigError, OutOfMemory, StartupError
from tidemill.hardware import Hardware
from tidemill.models.count import count_weights
from tidemill.models.registry import describe
from tidemill.nvidia import Gpu
from tidemill.plan.parts import CUDA_BYTES
from tidemill.precision import StoredWeights

GIB = 2**30
H200 = Gpu("NVIDIA H200", 140 * GIB, GIB // 2, (9, 0))
T4 = Gpu("Tesla T4", 15 * GIB, 0, (7, 5))
MACHINE = Hardware(
    cores=8,
    cores_why="cores this process may run on",
    memory_bytes=128 * GIB,
    available_bytes=100 * GIB,
    memory_why="memory of this machine",
    cpu_name="Some CPU",
    cpu_features=frozenset({"avx512_bf16"}),
    gpus=(H200,),
    driver_cuda=(13, 0),
    torch_cuda="13.0",
)
SMALL = replace(MACHINE, gpus=(T4,))
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SPEC = describe(RAW)
COUNT = count_weights(SPEC)
FACTS = ModelFacts(
    path="/models/some",
    kind="folder",
    origin="some",
    shape=SPEC.shape,
    impl="native",
    impl_why="a native architecture",
    num_parameters=COUNT.numbers,
    stored=StoredWeights("BF16"),
    eos_ids=(2,),
    count=COUNT,
)
FOREIGN = replace(FACTS, impl="transformers", count=None)


def resolved(hardware: Hardware = MACHINE, facts: ModelFacts = FACTS, **args: Any) -> EngineConfig:
    return resolve(EngineArgs(**args), facts, hardware)


def refusal(hardware: Hardware = MACHINE, facts: ModelFacts = FACTS, **args: Any) -> StartupError:
    with pytest.raises(StartupError) as caught:
        resolved(hardware, facts, **args)
    return caught.value


def test_a_gpu_is_taken_where_there_is_one():
    config = resolved()
    assert (config.device, config.device_index, config.device_name) == ("cuda", 0, "NVIDIA H200")
    assert "H200" in config.why["device"] and "9.0" in config.why["device"]
    assert resolved(device="cpu", max_model_len=4096).device == "cpu"
    two = replace(MACHINE, gpus=(T4, H200))
    assert resolved(two, device="cuda:1").device_index == 1


OBSTACLES = {
    "no driver": ({"gpus": (), "gpu_problem": "libnvidia-ml.so.1: cannot open"}, "libnvidia-ml", "driver"),
    "hidden": (
        {"gpus": (), "gpu_problem": "CUDA_VISIBLE_DEVICES is '', which leaves none of the 2 cards"},
        "none of the 2 cards",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "half an update": (
        {"gpus": (), "gpu_problem": "the NVIDIA driver does not answer: Driver/library version mismatch (18)"},
        "version mismatch",
        "restart the machine",
    ),
    "error 803": (
        {"gpus": (), "gpu_problem": "the NVIDIA driver does not answer: cuInit: error 803"},
        "error 803",
        "restart the machine",
    ),
    "lost": ({"gpus": (), "gpu_problem": "card 0 does not answer: GPU is lost (15)"}, "GPU is lost", "restart"),
    "torch for CPUs": ({"torch_cuda": None}, "built for CPUs only", "pip"),
    "old driver": ({"driver_cuda": (12, 4)}, "12.4, and torch is built for CUDA 13.0", "update the NVIDIA driver"),
    "old card": ({"gpus": (replace(T4, name="P100", capability=(6, 0)),)}, "6.0, the kernels need 7.5", "--device cpu"),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_a_gpu_that_cannot_work_is_refused_or_passed_over_with_the_reason(case):
    changes, cause, fix = OBSTACLES[case]
    machine = replace(MACHINE, **changes)
    problem = refusal(machine, device="cuda")
    assert isinstance(problem, ConfigError) and problem.param == "device"
    assert cause in (problem.cause or "") and fix in (problem.fix or "")
    passed_over = resolved(machine, max_model_len=4096)
    assert passed_over.device == "cpu" and cause in passed_over.why["device"]


def test_an_old_card_in_the_first_slot_does_not_hide_a_newer_one():
    old = replace(T4, name="GT 1030", capability=(6, 1))
    machine = replace(MACHINE, gpus=(old, H200))
    for asked in ("auto", "cuda"):
        config = resolved(machine, device=asked)
        assert (config.device_index, config.device_name) == (1, "NVIDIA H200")
    assert "GT 1030" in (refusal(machine, device="cuda:0").cause or "")


def test_a_card_behind_a_lost_one_is_missing_for_that_reason():
    problem = refusal(replace(MACHINE, gpu_problem="card 1 does not answer: GPU is lost (15)"), device="cuda:1")
    assert "GPU is lost" in (problem.cause or "")


def test_newer_builds_run_on_older_drivers_of_the_same_major_version():
    assert resolved(replace(MACHINE, driver_cuda=(12, 2), torch_cuda="12.8")).device == "cuda"


@pytest.mark.parametrize("device", ["cuda:3", "tpu", "cuda:x", "cuda:²", "cpu:0", "auto:1"])
def test_devices_that_are_not_there(device):
    problem = refusal(device=device)
    assert problem.param == "device" and problem.fix


@pytest.mark.parametrize(
    ("gpu", "stored", "asked", "dtype", "words"),
    [
        (H200, "BF16", "auto", "bfloat16", "as stored"),
        (H200, "F16", "auto", "float16", "as stored"),
        (H200, "F32", "auto", "float32", "as stored"),
        (H200, "Q4_K", "auto", "bfloat16", "Q4_K"),
        (H200, "BF16", "half", "float16", "asked for"),
        (T4, "BF16", "auto", "float16", "no bfloat16"),
        (T4, "Q4_K", "auto", "float16", "no bfloat16"),
        (T4, "F32", "auto", "float32", "as stored"),
    ],
)
def test_precision_follows_the_file_and_the_card(gpu, stored, asked, dtype, words):
    small = describe({**RAW, "num_hidden_layers": 2, "vocab_size": 1000})
    facts = replace(FACTS, stored=StoredWeights(stored), shape=small.shape, count=count_weights(small))
    config = resolved(replace(MACHINE, gpus=(gpu,)), facts, dtype=asked)
    assert config.dtype == dtype
    assert words in config.why["dtype"]


def test_bfloat16_on_a_card_without_it_is_refused_with_half():
    problem = refusal(SMALL, dtype="bfloat16")
    assert (problem.param, problem.fix) == ("dtype", "--dtype half")


def test_what_only_a_gpu_does_is_refused_with_why_none_is_used():
    machine = replace(SMALL, torch_cuda=None)
    for args in ({"dtype": "half"}, {"cpu_offload_gb": 1.0}):
        assert "Tesla T4, but the installed torch is built for CPUs" in (refusal(machine, **args).cause or "")


@pytest.mark.parametrize(("name", "capability"), [("Tesla T4", (7, 5)), ("NVIDIA A10G", (8, 6))])
def test_an_fp8_cache_on_a_card_without_fp8_is_refused_with_int8(name, capability):
    machine = replace(MACHINE, gpus=(replace(H200, name=name, capability=capability),))
    problem = refusal(machine, dtype="half", kv_cache_dtype="fp8")
    assert name in problem.message and "8.9" in (problem.cause or "")
    assert (problem.param, problem.fix) == ("kv_cache_dtype", "--kv-cache-dtype int8")
    assert resolved(machine, dtype="half", kv_cache_dtype="int8").kv_cache_dtype == "int8"


def test_what_a_gpu_likes_by_default():
    config = resolved()
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (64, 256, 8192)
    small = describe({**RAW, "num_hidden_layers": 2})
    config = resolved(SMALL, replace(FACTS, shape=small.shape, count=count_weights(small)))
    assert (config.block_size, config.max_num_batched_tokens) == (64, 2048)


def test_graphs_are_captured_for_the_batches_that_occur():
    sizes = resolved().graph_sizes
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[-1] == 256 and sizes == sorted(set(sizes)) and 144 in sizes and 72 not in sizes
    assert not resolved().enforce_eager
    assert resolved(max_num_seqs=5).graph_sizes == [1, 2, 4, 5]
    assert resolved(max_num_seqs=1).graph_sizes == [1]
    assert resolved(max_num_seqs=1000).graph_sizes[-2:] == [480, 512]


@pytest.mark.parametrize(
    ("facts", "args", "words"),
    [
        (FACTS, {"enforce_eager": True}, "asked for"),
        (FOREIGN, {}, "transformers"),
        (FACTS, {"cpu_offload_gb": 2}, "--cpu-offload-gb"),
        (FACTS, {"device": "cpu", "max_model_len": 4096}, "GPU"),
    ],
)
def test_where_graphs_are_not_captured_the_reason_is_told(facts, args, words):
    config = resolved(facts=facts, **args)
    assert config.graph_sizes == [] and config.enforce_eager
    assert words in config.why["graph_sizes"]


def test_the_plan_adds_up_to_the_share_of_the_card():
    config = resolved()
    assert config.weight_bytes == config.plan["weights"] == 2 * COUNT.numbers
    assert {"weights", "activations", "graphs", "tables", "CUDA"} <= set(config.plan)
    assert config.plan["CUDA"] == CUDA_BYTES
    spent = sum(config.plan.values()) + config.kv_bytes
    block = config.kv_bytes // config.num_blocks
    assert block == 64 * 32 * 2 * 8 * 128 * 2
    usable = int(0.9 * H200.total_bytes) - H200.used_bytes
    assert usable - block < spent <= usable
    assert config.max_model_len == 131072
    assert "90% of the card" in config.why["num_blocks"]


def test_a_share_of_the_card():
    assert resolved(gpu_memory_utilization=0.5).kv_bytes < resolved().kv_bytes - 50 * GIB


def test_what_every_graph_keeps_is_planned():
    config = resolved()
    kept = 2 * 4096 * sum(config.graph_sizes) + 4 * 128256 * (1 + 2 + 4 + 8 + 16)
    assert kept < config.plan["graphs"] < kept + 200 * 2**20


def test_fp8_that_is_widened_first_is_planned_wide():
    """By way of float32: its copy and its product with the scales."""
    machine = replace(MACHINE, gpus=(replace(H200, capability=(8, 0)),))
    more = resolved(machine, quantization="fp8").activation_bytes - resolved(machine).activation_bytes
    assert more == 8 * 2 * 14336 * 4096


def test_two_engines_with_half_the_usual_share_each_get_along():
    first = resolved(gpu_memory_utilization=0.45)
    held = sum(first.plan.values()) + first.kv_bytes + H200.used_bytes
    second = resolved(replace(MACHINE, gpus=(replace(H200, used_bytes=held),)), gpu_memory_utilization=0.45)
    together = held + sum(second.plan.values()) + second.kv_bytes
    assert second.kv_bytes > 0.9 * first.kv_bytes and together <= 0.9 * H200.total_bytes


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("held", [0, 30, 100])
def test_a_plan_never_takes_more_than_is_free(share, held):
    gpu = replace(H200, used_bytes=held * GIB)
    try:
        config = resolved(replace(MACHINE, gpus=(gpu,)), gpu_memory_utilization=share, quantization="int4")
    except OutOfMemory:
        assert held == 100 or share == 0.1
        return
    taken = sum(config.plan.values()) + config.kv_bytes
    assert taken <= min(share * gpu.total_bytes, gpu.free_bytes)


def test_a_tiny_model_does_not_take_blocks_nobody_can_use():
    tiny = describe({**RAW, "hidden_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": 100})
    config = resolved(facts=replace(FACTS, shape=tiny.shape, count=count_weights(tiny)))
    assert config.num_blocks == 2**19


def test_what_others_hold_is_named():
    busy = replace(MACHINE, gpus=(replace(H200, used_bytes=120 * GIB),))
    problem = refusal(busy)
    assert isinstance(problem, OutOfMemory)
    assert "others hold 120.00 GiB" in (problem.cause or "") and "nvidia-smi" in (problem.fix or "")
    assert "--device cuda" not in (problem.fix or "")
    beside = replace(MACHINE, gpus=(busy.gpus[0], T4, H200))
    assert (refusal(beside).fix or "").startswith("--device cuda:2 (140 GiB are free there), or")


def test_a_model_that_does_not_fit_is_refused_with_what_helps():
    problem = refusal(SMALL, dtype="half")
    assert isinstance(problem, OutOfMemory)
    assert "weights 14.96" in (problem.cause or "") and "--quantization int4" in (problem.fix or "")
    quantised = resolved(SMALL, quantization="int4", max_num_seqs=16)
    assert quantised.weight_bytes < 6 * GIB
    assert quantised.max_model_len > 8192


def test_a_context_that_does_not_fit_is_shortened_unless_it_was_asked_for():
    config = resolved(SMALL, quantization="int4", max_num_seqs=16)
    assert config.max_model_len < 131072 and "131072" in config.why["max_model_len"]
    assert refusal(SMALL, quantization="int4", max_num_seqs=16, max_model_len=131072).param == "max_model_len"


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_quantised_weights_are_planned_packed(name):
    config = resolved(quantization=name)
    assert config.quantization == name
    share = config.weight_bytes / resolved().weight_bytes
    assert share < {"int4": 0.38, "int8": 0.6, "fp8": 0.6}[name]


def test_fp8_on_an_older_card_is_for_weights_only_and_says_so():
    config = resolved(SMALL, quantization="fp8", max_num_seqs=8)
    assert "weights only" in config.why["quantization"]
    assert "weights only" not in resolved(quantization="fp8").why["quantization"]


def test_a_quantised_cache_holds_almost_twice_as_much():
    plain, eight = resolved(), resolved(kv_cache_dtype="fp8")
    assert (plain.kv_cache_dtype, eight.kv_cache_dtype) == ("bfloat16", "fp8")
    assert eight.kv_bytes // eight.num_blocks == 64 * 32 * 2 * 8 * (128 + 4)
    assert eight.num_blocks / plain.num_blocks == pytest.approx(2 * 128 / 132, rel=0.01)
    assert eight.cache_saving == pytest.approx(2 * 128 / 132, rel=0.01)
    assert resolved(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    assert resolved(kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"


def test_offloaded_layers_leave_the_card_and_are_kept_by_the_host():
    plain, config = resolved(), resolved(cpu_offload_gb=4)
    layer = COUNT.layers[0].nbytes(2)
    assert config.offload_layers == -(-4 * GIB // layer) + 2, "two places to pass through are deducted"
    freed = plain.weight_bytes - config.weight_bytes - config.plan["offload staging"]
    assert 4 * GIB <= freed < 4 * GIB + layer
    assert plain.weight_bytes - config.weight_bytes == config.offload_layers * layer
    assert config.plan["offload staging"] == 2 * layer
    assert "4.06 GiB less" in config.why["offload_layers"]
    assert "100 GiB were asked for" in resolved(cpu_offload_gb=100).why["offload_layers"]
    few = replace(MACHINE, available_bytes=4 * GIB)
    problem = refusal(few, cpu_offload_gb=4)
    assert isinstance(problem, OutOfMemory) and problem.fix == "--cpu-offload-gb 2"
    assert resolved(few, cpu_offload_gb=2).offload_layers


@pytest.mark.parametrize(
    ("facts", "args"),
    [
        (FACTS, {"quantization": "awq"}),
        (FOREIGN, {"quantization": "int4"}),
        (FACTS, {"kv_cache_dtype": "int3"}),
        (FACTS, {"kv_cache_dtype": "float16"}),
        (FACTS, {"cpu_offload_gb": -1.0}),
        (FACTS, {"cpu_offload_gb": float("nan")}),
        (FACTS, {"cpu_offload_gb": 1.0, "device": "cpu"}),
        (FOREIGN, {"cpu_offload_gb": 1.0}),
        (FACTS, {"load_format": "tensorizer"}),
        (FACTS, {"check_weights": True, "load_format": "dummy"}),
        (FOREIGN, {"load_format": "dummy"}),
    ],
    ids=str,
)
def test_refusals_name_the_field_and_the_fix(facts, args):
    problem = refusal(facts=facts, **args)
    assert isinstance(problem, ConfigError)
    assert problem.param == next(iter(args))
    assert problem.fix


def test_a_format_the_checkpoint_is_not_is_refused_with_what_it_is():
    problem = refusal(quantization="awq")
    assert "BF16" in (problem.cause or "") and "int4, int8, fp8" in (problem.cause or "")


class OutOfMemoryError(RuntimeError):
    """Called like torch's."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. If reserved ..."), "--gpu-memory-utilization"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"), "--gpu-memory-utilization"),
        (RuntimeError("Error 803: system has unsupported display driver / cuda driver combination"), "restart"),
        (RuntimeError("No CUDA GPUs are available"), "CUDA_VISIBLE_DEVICES"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "--gpu-reset"),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), "gcc"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_failures_of_cuda_come_with_a_fix(error, words):
    problem = device_problem(error)
    assert problem is not None and problem.cause
    assert words in (problem.fix or "")
    assert "If reserved" not in problem.cause


def test_memory_that_ran_out_while_a_graph_was_captured_is_seen_behind_the_failed_capture():
    ending = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    ending.__context__ = OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    assert isinstance(device_problem(ending), OutOfMemory)


def test_errors_after_which_only_a_new_process_helps():
    assert context_lost(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not context_lost(OutOfMemoryError("CUDA out of memory."))
    assert not context_lost(ValueError("device-side assert"))


@pytest.mark.parametrize(
    "error", [ValueError("no"), RuntimeError("CUDA error: an illegal memory access"), KeyError("a")]
)
def test_other_failures_stay_what_they_are(error):
    assert device_problem(error) is None


def test_the_engine_gets_settings_that_the_user_has_not_made():
    assert missing_settings({})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "expandable_segments" in missing_settings({})["PYTORCH_ALLOC_CONF"]
    assert missing_settings({"PYTORCH_CUDA_ALLOC_CONF": "x", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == {}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "OutOfMemory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
    ],
)
def test_a_failed_step_ends_its_requests_and_a_dead_card_the_engine(monkeypatch, error, kind):
    """So that the server starts another process; in this one every step would fail."""
    core = toy_core()
    ask(core, "a", [1, 2, 3], 4)

    def launch(step: object) -> None:
        raise error

    monkeypatch.setattr(core.runner, "launch", launch)
    if kind is None:
        with pytest.raises(RuntimeError):
            core.step()
        return
    (output,) = core.step()
    assert output.problem is not None and output.problem["kind"] == kind
    assert "--max-num-seqs" in (output.problem["fix"] or "")


def test_graphs_that_were_asked_for_and_cannot_be_are_refused():
    assert resolved(enforce_eager=False).graph_sizes
    problem = refusal(device="cpu", max_model_len=4096, enforce_eager=False)
    assert problem.param == "enforce_eager" and "graphs are for GPUs" in str(problem.cause)
    assert "transformers" in str(refusal(facts=FOREIGN, enforce_eager=False).cause)


def test_the_report_says_how_much_of_a_model_is_packed():
    assert "87% of the weights are packed" in resolved(quantization="int4").why["quantization"]


def test_more_rows_than_the_tables_count_are_refused():
    problem = refusal(max_num_seqs=2**15, max_model_len=65536, num_gpu_blocks_override=2000)
    assert problem.param == "max_num_seqs" and problem.fix is not None and "--max-num-seqs" in problem.fix
