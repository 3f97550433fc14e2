"""Parameters of OpenAI's and vLLM's API that cannot act here, and the values at which they need not act.

A request that sends one at a neutral value (`functions: []`, `store: false`) is served; any other value is refused by
name with the reason. A feature that arrives later leaves this table and joins a schema; one that arrives in part stays
here for the other part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidemill.errors import UnsupportedParameter

Body = dict[str, Any]
Neutral = Callable[[Any, Body], bool]


def _never(value: Any, body: Body) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    neutral: Neutral
    acts: Neutral = _never
    """Whether the value can act after all; then it is the schema's to read."""


@dataclass(frozen=True, slots=True)
class Refusals:
    table: dict[str, Refusal]

    def drop_neutral(self, body: Body) -> Body:
        """The body without the parameters that need not act; raises for the first that would have to."""
        kept = {}
        for name, value in body.items():
            refusal = self.table.get(name)
            if refusal is None or (value is not None and refusal.acts(value, body)):
                kept[name] = value
            elif value is not None and not refusal.neutral(value, body):
                raise UnsupportedParameter(f"{name} is not supported: {refusal.reason}", param=name)
        return kept


def _only(*values: Any) -> Neutral:
    return lambda value, body: any(type(value) is type(known) and value == known for known in values)


def _number(known: float) -> Neutral:
    return lambda value, body: isinstance(value, int | float) and not isinstance(value, bool) and value == known


def _empty(value: Any, body: Body) -> bool:
    return isinstance(value, list | dict) and not value


def _boolean(value: Any, body: Body) -> bool:
    return isinstance(value, bool)


def _only_shown(value: Any, body: Body) -> bool:
    """Whether tools are to be written into the prompt and no calls to be read from the answer."""
    return bool(value) and body.get("tool_choice") == "none"


def _no_tools(value: Any, body: Body) -> bool:
    return value == "auto" and not body.get("tools")


def _same_as_n(value: Any, body: Body) -> bool:
    n = body.get("n")
    return type(value) is int and value == (1 if n is None else n)


_CONSTRAINED = "structured output is not available in this version; ask for JSON in the prompt"
_TOOLS = "tool calling is not available in this version"
_CALLS = (
    'answers are not read for tool calls in this version; with tool_choice "none" the tools are written into the '
    "prompt and the answer is plain text"
)
_REASONING = "the served models have no separate reasoning"
_BEAMS = "beam search is not available; use n with temperature"

_EVERYWHERE = {
    "response_format": Refusal(_CONSTRAINED, _only({"type": "text"})),
    "structured_outputs": Refusal(_CONSTRAINED, _never),
    "structural_tag": Refusal(_CONSTRAINED, _never),
    "guided_json": Refusal(_CONSTRAINED, _never),
    "guided_regex": Refusal(_CONSTRAINED, _never),
    "guided_choice": Refusal(_CONSTRAINED, _never),
    "guided_grammar": Refusal(_CONSTRAINED, _never),
    "guided_decoding_backend": Refusal(_CONSTRAINED, _never),
    "guided_whitespace_pattern": Refusal(_CONSTRAINED, _never),
    "use_beam_search": Refusal(_BEAMS, _only(False)),
    "length_penalty": Refusal(_BEAMS, _number(1)),
    "early_stopping": Refusal(_BEAMS, _only(False)),
    "best_of": Refusal("only best_of equal to n is possible; use n", _same_as_n),
    "logits_processors": Refusal("requests cannot bring code; use logit_bias", _empty),
    "spaces_between_special_tokens": Refusal("special tokens are written as the tokenizer has them", _only(True)),
    "kv_transfer_params": Refusal("caches are not moved between servers", _empty),
    "vllm_xargs": Refusal("it is private to vLLM", _empty),
    "prompt_embeds": Refusal("prompts are text or token ids", _never),
    "mm_processor_kwargs": Refusal("the served models take text only", _empty),
    "service_tier": Refusal("there is one tier", _only("auto", "default")),
}

CHAT_REFUSALS = Refusals(
    _EVERYWHERE
    | {
        "tools": Refusal(_CALLS, _empty, _only_shown),
        "tool_choice": Refusal(_CALLS, _no_tools, _only("none")),
        "parallel_tool_calls": Refusal(_TOOLS, _boolean),
        "functions": Refusal(_TOOLS, _empty),
        "function_call": Refusal(_TOOLS, _only("none")),
        "audio": Refusal("the served models write text only", _never),
        "modalities": Refusal("the served models write text only", _only(["text"])),
        "prediction": Refusal("predicted outputs are not available", _never),
        "store": Refusal("nothing is stored", _only(False)),
        "web_search_options": Refusal("this server does not search the web", _never),
        "reasoning_effort": Refusal(_REASONING, _never),
        "include_reasoning": Refusal(_REASONING, _boolean),
        "verbosity": Refusal("length is set with max_completion_tokens", _never),
        "chat_template": Refusal(
            "a template is code, so it comes from the operator: start the server with --chat-template", _never
        ),
        "echo": Refusal("send the text as the last message with continue_final_message", _only(False)),
    }
)

COMPLETION_REFUSALS = Refusals(
    _EVERYWHERE | {"suffix": Refusal("the served models do not fill in the middle; put all text in prompt", _never)}
)

TOKENIZE_REFUSALS = Refusals({"chat_template": CHAT_REFUSALS.table["chat_template"]})
