"""What a caller may ask of generation, with the ranges that make sense.

The one place where ranges are checked, for the Python API and HTTP alike. Knows nothing of tokenizers or vocabularies:
what depends on the served model is checked in `engine/admission.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tidemill.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_N = 128
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
MAX_BAD_WORDS = 256
GREEDY_BELOW = 1e-5
"""Temperatures below this choose the best token: dividing by them would leave nothing to compare."""

_INTEGERS = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """vLLM's names and defaults. `temperature=0` is greedy; `top_k` of 0 or -1 means all tokens."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, [])
        self._check_types()
        self.validate()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def _check_types(self) -> None:
        """Python callers can pass anything; a float that counts tokens would surface deep inside a step."""
        for name in (*_INTEGERS, *_OPTIONAL_INTEGERS):
            value = getattr(self, name)
            if type(value) is not int and not (value is None and name in _OPTIONAL_INTEGERS):
                raise InvalidRequest(f"{name} must be an integer, got {value!r}", param=name)
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, float):
                raise InvalidRequest(f"{name} must be a number, got {value!r}", param=name)
        for name, kind in (("stop", str), ("bad_words", str), ("stop_token_ids", int), ("allowed_token_ids", int)):
            if any(type(item) is not kind for item in getattr(self, name) or ()):
                raise InvalidRequest(f"{name} must hold only {kind.__name__} values", param=name)
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int or type(bias) not in (int, float):
                raise InvalidRequest(
                    f"logit_bias maps token ids to numbers, got {token!r}: {bias!r}", param="logit_bias"
                )

    def validate(self) -> None:
        """Raises InvalidRequest naming the first field that is out of range."""
        _within("n", self.n, 1, MAX_N)
        _within("temperature", self.temperature, 0.0, 100.0)
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequest(f"top_p must be greater than 0 and at most 1, got {self.top_p}", param="top_p")
        if self.top_k < -1:
            raise InvalidRequest(
                f"top_k must be at least 1, or 0 or -1 for all tokens, got {self.top_k}", param="top_k"
            )
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise InvalidRequest(
                f"repetition_penalty must be greater than 0, got {self.repetition_penalty}", param="repetition_penalty"
            )
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), MAX_SEED)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop strings must not be empty", param="stop")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words takes at most {MAX_BAD_WORDS} texts, got {len(self.bad_words)}", param="bad_words"
            )
        if any(not text for text in self.bad_words):
            raise InvalidRequest("bad_words must not contain an empty string", param="bad_words")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        for token, bias in (self.logit_bias or {}).items():
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise InvalidRequest(
                    f"logit_bias for token {token} must be from -100 to 100, got {bias}", param="logit_bias"
                )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens")
        if self.min_tokens < 0:
            raise InvalidRequest(f"min_tokens must be at least 0, got {self.min_tokens}", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < -1:
            raise InvalidRequest(
                "truncate_prompt_tokens must be at least 1, or -1 for the model's limit", param="truncate_prompt_tokens"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must not be 0", param="truncate_prompt_tokens")


def _within(name: str, value: Any, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {value}", param=name)
