"""docs/models.md is generated from the registry and from the families' tests, and must say what they say.

python -m tests.test_docs_models     # writes it again
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tidemill.models.registry import NATIVE, TEXT_PARTS
from tidemill.weights.gguf_architectures import ARCHITECTURES, MIXTURES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
MARK = "<!-- generated from here on: python -m tests.test_docs_models -->"

TESTED_IN = {
    "baichuan": "baichuan",
    "cohere": "cohere",
    "deepseek": "deepseek",
    "falcon": "falcon",
    "gemma": "gemma",
    "gpt2": "gpt",
    "gpt_neo": "gpt",
    "gptj": "gpt",
    "gpt_neox": "gpt",
    "granite": "granite",
    "internlm": "internlm",
    "llama": "llama",
    "mixtral": "moe",
    "opt": "opt",
    "phi": "phi",
    "phi3": "phi",
    "qwen_moe": "moe",
    "stablelm": "stablelm",
}
"""The family's file in models/ -> tests/test_models_<this>.py."""


def page() -> str:
    # Converters write Mistral as a llama with a window.
    gguf = {"MistralForCausalLM": ["llama"]}
    for architecture in (*ARCHITECTURES.values(), *MIXTURES.values()):
        gguf.setdefault(architecture.class_name, []).append(architecture.name)
    lines = [
        MARK,
        "",
        "## Native architectures",
        "",
        "| architecture | known as | described in | GGUF | tested by |",
        "|---|---|---|---|---|",
    ]
    for name, native in NATIVE.items():
        tests = TESTED_IN[native.file]
        lines.append(
            f"| {name} | {native.examples} | `models/{native.file}.py` | {', '.join(gguf.get(name, []))} "
            f"| `tests/test_models_{tests}.py` |"
        )
    for name, parts in TEXT_PARTS.items():
        lines.append(f"| {name} | text part only: {', '.join(parts.values())} | | | `tests/test_models_*.py` |")
    lines += ["", "## What the tests vary", "", "| test | cases |", "|---|---|"]
    for tests in sorted(set(TESTED_IN.values())):
        cases = import_module(f"tests.test_models_{tests}").CASES
        lines.append(f"| `tests/test_models_{tests}.py` | {', '.join(cases)} |")
    return "\n".join([*lines, ""])


def test_the_page_says_what_the_registry_and_the_tests_say():
    assert PAGE.read_text().partition(MARK)[2] == page().partition(MARK)[2], "run python -m tests.test_docs_models"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + page())
