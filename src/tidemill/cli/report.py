"""The start-up report: what was chosen and why, where to connect, and a line to copy."""

from __future__ import annotations

import json
import shlex

from tidemill.config import EngineConfig
from tidemill.engine.messages import Ready
from tidemill.engine.prepare import Prepared

GIB = 2**30


def startup_report(
    prepared: Prepared, names: tuple[str, ...], ready: Ready, url: str, *, key_variable: str | None = None
) -> str:
    """`key_variable` is the environment variable that holds a key, where the server asks for one."""
    config, why = prepared.config, prepared.config.why
    rows = [
        ("model", " ".join(names), config.model_path if config.model_origin in names else config.model_origin),
        ("device", *_device(config)),
        ("dtype", config.dtype, why["dtype"]),
        *_gpu_rows(config),
        ("context", f"{config.max_model_len:,} tokens", why["max_model_len"]),
        (
            "KV cache",
            f"{config.num_blocks:,} blocks, {config.num_cache_tokens:,} tokens, {config.kv_bytes / GIB:.2f} GiB",
            f"{why['num_blocks']}; {config.block_size} tokens a block, {why['block_size']}",
        ),
        (
            "at once",
            f"{min(config.full_length_requests, config.max_num_seqs):.1f} requests of full length",
            f"the cache holds so many; at most {config.max_num_seqs} sequences run ({why['max_num_seqs']}), "
            f"{config.max_waiting} wait ({why['max_waiting']})",
        ),
        ("step", f"{config.max_num_batched_tokens:,} tokens", why["max_num_batched_tokens"]),
        ("scheduler", config.scheduling_policy, _scheduler_note(prepared)),
        ("memory", *_memory(config, ready)),
        ("chat", "yes" if prepared.chat_template else "no chat template", _chat_note(prepared)),
        ("loaded in", f"{ready.load_seconds:.1f} s", "from the start of the engine's imports to its first step"),
    ]
    if config.cache_saving > 1.005:
        saving = ("", f"{config.cache_saving:.1f}x the requests of a plain cache", why["cache_saving"])
        rows.insert(next(index for index, row in enumerate(rows) if row[0] == "at once") + 1, saving)
    rows.extend((note.name, note.value, note.reason) for note in prepared.notes)
    width = max(len(value) for _, value, _ in rows)
    lines = [f"  {name:<11}{value:<{width}}  {reason}".rstrip() for name, value, reason in rows]
    curl = _curl(names[0], url, prepared, key_variable)
    return "\n".join(["", "tidemill is ready", *lines, "", f"  serving    {url}", "", curl, ""])


def _device(config: EngineConfig) -> tuple[str, str]:
    if config.device == "cpu":
        return f"cpu, {config.threads} threads", f"{config.why['device']}; {config.why['threads']}"
    return f"{config.device}:{config.device_index}, {config.device_name}", config.why["device"]


def _gpu_rows(config: EngineConfig) -> list[tuple[str, str, str]]:
    """What only some starts have."""
    rows = []
    if config.quantization is not None or "widened" in config.why["quantization"]:
        rows.append(("weights", config.quantization or "dense", config.why["quantization"]))
    if config.kv_cache_dtype != config.dtype:
        rows.append(("KV numbers", config.kv_cache_dtype, config.why["kv_cache_dtype"]))
    if config.offload_layers:
        rows.append(("offloaded", f"{config.offload_layers} layers", config.why["offload_layers"]))
    if config.device == "cuda":
        sizes = config.graph_sizes
        value = f"{len(sizes)}, of 1 to {sizes[-1]} sequences" if sizes else "none"
        rows.append(("graphs", value, config.why["graph_sizes"]))
    if config.load_format == "dummy":
        rows.append(("weights", "random", "--load-format dummy: answers mean nothing"))
    return rows


def _memory(config: EngineConfig, ready: Ready) -> tuple[str, str]:
    """Measured, beside what was planned."""
    parts = " + ".join(f"{size / GIB:.2f} {name}" for name, size in config.plan.items() if size)
    if config.device == "cpu":
        return f"{ready.resident_bytes / GIB:.2f} GiB now", f"planned {parts}, the cache fills as it is used"
    held = f"{ready.device_bytes / GIB:.2f} GiB of the card now"
    host = f"{ready.resident_bytes / GIB:.2f} GiB of host memory"
    planned = (sum(config.plan.values()) + config.kv_bytes) / GIB
    return held, f"planned {planned:.2f} at most: {parts} + {config.kv_bytes / GIB:.2f} KV cache; and {host}"


def _scheduler_note(prepared: Prepared) -> str:
    config = prepared.config
    caching = "on" if config.enable_prefix_caching else "off"
    chunked = "on" if config.enable_chunked_prefill else "off"
    return f"prefix caching {caching}, chunked prefill {chunked}"


def _chat_note(prepared: Prepared) -> str:
    if prepared.chat_template is None:
        return "/v1/completions works; give --chat-template for /v1/chat/completions"
    template = prepared.chat_template
    reads = [name for name in ("tools", "documents") if name in template.variables] + template.keywords
    return f"template: {template.origin}" + (f"; reads {', '.join(reads)}" if reads else "")


def _curl(name: str, url: str, prepared: Prepared, key_variable: str | None) -> str:
    """Quoted for a shell; a key is named, never printed."""
    body: dict[str, object] = {"model": name}
    if prepared.chat_template is None:
        route, body = "completions", {**body, "prompt": "Once upon a time", "max_tokens": 32}
    else:
        route, body = "chat/completions", {**body, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    flags = ""
    if url.startswith("unix:"):
        flags, url = f"--unix-socket {shlex.quote(url.removeprefix('unix:'))} ", "http://localhost"
    elif url.startswith("https:"):
        # The certificate names the outside, not this address.
        flags = "--insecure "
    key = f' -H "Authorization: Bearer ${key_variable}"' if key_variable else ""
    data = shlex.quote(json.dumps(body))
    return f"  curl {flags}{url}/v1/{route} -H 'Content-Type: application/json'{key} \\\n    -d {data}"
