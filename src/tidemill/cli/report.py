"""The start-up report: what was chosen and why, where to connect, and a line to copy."""

from __future__ import annotations

from tidemill.engine.messages import Ready
from tidemill.engine.prepare import Prepared

GIB = 2**30


def startup_report(prepared: Prepared, names: tuple[str, ...], ready: Ready, url: str, has_key: bool) -> str:
    config, why = prepared.config, prepared.config.why
    rows = [
        ("model", " ".join(names), config.model_origin if config.model_origin not in names else config.model_path),
        ("dtype", config.dtype, why["dtype"]),
        ("device", f"{config.device}, {config.threads} threads", why["threads"]),
        ("context", f"{config.max_model_len:,} tokens", why["max_model_len"]),
        (
            "KV cache",
            f"{config.num_blocks:,} blocks, {config.num_cache_tokens:,} tokens, {config.kv_bytes / GIB:.2f} GiB",
            why["num_blocks"],
        ),
        (
            "at once",
            f"{min(config.full_length_requests, config.max_num_seqs):.1f} requests of full length",
            f"at most {config.max_num_seqs} sequences run, {config.max_waiting} wait",
        ),
        ("step", f"{config.max_num_batched_tokens:,} tokens", why["max_num_batched_tokens"]),
        (
            "memory",
            f"{ready.resident_bytes / GIB:.2f} GiB now",
            f"planned {config.weight_bytes / GIB:.2f} weights + {config.activation_bytes / GIB:.2f} activations, "
            "the cache fills as it is used",
        ),
        ("chat", "yes" if prepared.chat_template else "no chat template", _chat_note(prepared)),
        ("loaded in", f"{ready.load_seconds:.1f} s", ""),
    ]
    width = max(len(value) for _, value, _ in rows)
    lines = [f"  {name:<10}{value:<{width}}  {reason}".rstrip() for name, value, reason in rows]
    return "\n".join(["", "tidemill is ready", *lines, "", f"  serving   {url}", "", _curl(names[0], url, prepared, has_key), ""])


def _chat_note(prepared: Prepared) -> str:
    if prepared.chat_template is None:
        return "/v1/completions works; give --chat-template for /v1/chat/completions"
    return "template of the model"


def _curl(name: str, url: str, prepared: Prepared, has_key: bool) -> str:
    key = " -H 'Authorization: Bearer '$TIDEMILL_API_KEY" if has_key else ""
    if prepared.chat_template is None:
        body = f'{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 32}}'
        route = "completions"
    else:
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
        route = "chat/completions"
    return f"  curl {url}/v1/{route} -H 'Content-Type: application/json'{key} \\\n    -d '{body}'"
