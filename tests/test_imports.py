"""Who may import whom. The rooms only hold if nothing reaches around them, so the imports themselves are read."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tidemill

SOURCE = Path(tidemill.__file__).parent

BELOW = {
    "cli": {"server", "engine", "core", "weights", "config", "errors", "hardware", "llm", "progress", "quantise"},
    "server": {"engine", "core", "text", "errors"},
    "llm": {"engine", "core", "text", "config", "errors", "progress"},
    "engine": {"core", "runtime", "models", "text", "weights", "config", "precision", "errors", "hardware"},
    "quantise": {"runtime", "core", "models", "layers", "ops", "quant", "weights", "text", "config", "errors"},
    "core": {"errors"},
    "runtime": {"core", "models", "layers", "ops", "quant", "weights", "config", "plan", "precision", "errors"},
    "models": {"layers", "ops", "quant", "errors"},
    "layers": {"ops", "quant", "errors"},
    "quant": {"errors"},
    "ops": {"quant"},
    "text": {"weights", "errors"},
    "weights": {"quant", "errors"},
    "config": {
        "device_choice",
        "precision",
        "plan",
        "hardware",
        "core",
        "models",
        "layers",
        "quant",
        "errors",
    },
    "plan": {"hardware", "nvidia", "core", "models", "quant", "errors"},
    "precision": {"device_choice", "hardware", "nvidia", "quant", "errors"},
    "device_choice": {"hardware", "nvidia", "errors"},
    "hardware": {"nvidia", "ops"},
    "nvidia": set(),
    "progress": set(),
    "errors": set(),
}
"""Each room or root module, and what else of the package it may know."""

HEAVY = ("torch", "transformers")
TORCH_ROOMS = {"runtime", "models", "layers", "ops", "quant", "quantise"}
HTTP = ("fastapi", "starlette", "uvicorn", "pydantic", "msgspec", "prometheus_client")

FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Every module a file names in an import, at its head or inside a function."""
    package = ["tidemill", *path.relative_to(SOURCE).parent.parts]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else package[: len(package) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from tidemill import config` names a module behind the package.
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "tidemill" else {module}
    return names


def rooms_named(path: Path) -> set[str]:
    mine = [name.split(".") for name in imported(path) if name.split(".")[0] == "tidemill"]
    return {parts[1] for parts in mine if len(parts) > 1} - {"__version__", room_of(path)}


def test_every_room_is_in_the_picture():
    assert {room_of(path) for path in FILES} - {"__init__"} <= set(BELOW)


@pytest.mark.parametrize("room", sorted(BELOW))
def test_a_room_knows_only_what_is_below_it(room):
    for path in FILES:
        if room_of(path) == room:
            reached = rooms_named(path) - BELOW[room]
            assert not reached, f"{path.relative_to(SOURCE)} imports {sorted(reached)}"


def test_below_has_no_way_back_up():
    """The table itself is a direction: no room is below itself."""

    def everything_below(room: str, seen: frozenset[str] = frozenset()) -> set[str]:
        assert room not in seen, f"{room} is below itself"
        return BELOW[room].union(*(everything_below(other, seen | {room}) for other in BELOW[room]))

    for room in BELOW:
        everything_below(room)


@pytest.mark.parametrize("room", ["core", "server", "engine"])
def test_rooms_without_tensors_name_no_torch(room):
    for path in FILES:
        if room_of(path) == room:
            heavy = {name for name in imported(path) if name.split(".")[0] in HEAVY}
            assert not heavy, f"{path.relative_to(SOURCE)} imports {sorted(heavy)}"


@pytest.mark.parametrize("room", ["core", *sorted(TORCH_ROOMS), "engine", "text", "weights", "llm", "config"])
def test_only_the_server_knows_http(room):
    for path in FILES:
        # The wire between the two processes is msgpack; it is imported only when there are two.
        if room_of(path) == room and path.name != "transport.py":
            http = {name for name in imported(path) if name.split(".")[0] in HTTP}
            assert not http, f"{path.relative_to(SOURCE)} imports {sorted(http)}"


def run_python(code: str, *flags: str) -> str:
    ended = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "module",
    [
        "tidemill",
        "tidemill.cli.main",
        "tidemill.cli.serve",
        "tidemill.cli.report",
        "tidemill.config",
        "tidemill.core.scheduler",
        "tidemill.engine.client",
        "tidemill.engine.host",
        "tidemill.engine.prepare",
        "tidemill.engine.process",
        "tidemill.server.app",
        "tidemill.server.run",
    ],
)
def test_importing_it_loads_no_torch(module):
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_preparing_a_start_loads_no_torch():
    """A start that cannot succeed is refused within a second; importing torch alone takes longer."""
    code = "import sys; from tidemill.config import EngineArgs; from tidemill.engine.prepare import prepare; "
    code += f"prepare(EngineArgs('smollm2')); print([name for name in {HEAVY} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


BLOCKER = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HTTP}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize(
    "module",
    [
        "tidemill.llm",
        "tidemill.engine.core",
        "tidemill.engine.build",
        "tidemill.engine.links",
        "tidemill.runtime.build",
    ],
)
def test_an_engine_needs_no_http_stack(module):
    """A machine that only computes has torch, but nothing to serve with."""
    assert run_python(f"{BLOCKER}\nimport {module}\nprint('there')").strip() == "there"


def test_the_python_api_runs_without_an_http_stack():
    code = f"""{BLOCKER}
from tidemill import LLM, SamplingParams
llm = LLM("smollm2", max_model_len=64, max_num_seqs=1)
print(len(llm.generate(["Hello"], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids))
"""
    assert run_python(code).strip() == "2"
