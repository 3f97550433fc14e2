"""Reading a Hugging Face style config dictionary, in its old and new spellings, with errors that name the key.

What every family needs of it: sizes, the activation, the rotary embedding, sliding windows. Knows no family and no
tensors, so planning and start-up checks need no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.layers.rope_config import ROPE_PARAMETERS, RopeConfig

ACTIVATIONS = (
    "silu",
    "swish",
    "gelu",
    "gelu_python",
    "gelu_pytorch_tanh",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "relu",
    "relu2",
)
DEFAULT_MAX_POSITION = 2048
MOST_LAYERS = 10_000
LARGEST_SIZE = 2**40


class RawConfig:
    """config.json as one family reads it. `get` is the plain lookup; the others check what they give."""

    def __init__(self, raw: Mapping[str, Any], architecture: str) -> None:
        self.raw, self.architecture = raw, architecture

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is missing or null."""
        value = self.raw.get(key)
        return default if value is None else value

    def assuming(self, **defaults: Any) -> RawConfig:
        """The same config with what its family takes for granted where a key is missing. A null stays a null."""
        return RawConfig({**defaults, **self.raw}, self.architecture)

    def refuse(self, *keys: str) -> None:
        """Switches that would change the computation, and that the family does not act on."""
        for key in keys:
            if self.get(key):
                raise self._does_not_do(key)

    def only(self, **known: Any) -> None:
        """Switches that the family knows in one position, which is also what a missing key means."""
        for key, position in known.items():
            if self.get(key, position) != position:
                raise self._does_not_do(key)

    def _does_not_do(self, key: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"config.json: {key} is {self.raw[key]!r}, which the native {self.architecture} does not do",
            param=key,
            fix="--model-impl transformers",
        )

    def size(self, *keys: str, default: int | None = None) -> int:
        """A positive integer under the first of these keys that is there."""
        for key in keys:
            if self.raw.get(key) is not None:
                return _positive(key, self.raw[key])
        if default is None:
            raise bad_config(f"{keys[0]} is None, expected a positive integer")
        return default

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_config(f"{key} is {value!r}, expected a number")
        return float(value)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise bad_config(f"{key} is {value!r:.80}, expected an object")
        return dict(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def activation(self, *keys: str, default: str = "silu") -> str:
        key = next((key for key in keys if self.raw.get(key) is not None), keys[0])
        value = self.get(key, default)
        if value not in ACTIVATIONS:
            raise UnsupportedModel(
                f"config.json: {key} {value!r} is not known",
                param=key,
                cause=f"known are {', '.join(ACTIVATIONS)}",
                fix="--model-impl transformers",
            )
        return str(value)

    def max_position(self, *keys: str) -> int:
        return self.size(*(keys or ("max_position_embeddings",)), default=DEFAULT_MAX_POSITION)

    def kv_heads(self, heads: int, *keys: str) -> int:
        count = self.size(*(keys or ("num_key_value_heads",)), default=heads)
        if heads % count:
            raise bad_config(f"{heads} attention heads cannot share {count} key/value heads evenly")
        return count

    def layer_kinds(self, count: int) -> list[str] | None:
        """`layer_types`, where the config has them."""
        kinds = self.get("layer_types")
        if kinds is not None and not isinstance(kinds, list):
            raise bad_config(f"layer_types is {kinds!r:.80}, expected a list")
        if kinds is not None and len(kinds) != count:
            raise bad_config(f"layer_types has {len(kinds)} entries for {count} layers")
        return kinds

    def windows(self, slides: Sequence[bool]) -> list[int | None]:
        """Per layer, its sliding window. `layer_types` says which layers have one, or `slides` where it is missing."""
        kinds = self.layer_kinds(len(slides))
        if unknown := set(kinds or ()) - {"sliding_attention", "full_attention"}:
            raise UnsupportedModel(
                f"config.json: layer_types names {sorted(unknown)[0]}",
                param="layer_types",
                cause=f"the native {self.architecture} has sliding_attention and full_attention",
                fix="--model-impl transformers",
            )
        chosen = [kind == "sliding_attention" for kind in kinds] if kinds else slides
        return [self.size("sliding_window") if slide else None for slide in chosen]

    def rope(
        self,
        head_dim: int,
        parameters: Mapping[str, Any] | None = None,
        *,
        max_position: int | None = None,
        fraction: float = 1.0,
    ) -> RopeConfig:
        """The rotary embedding of heads this wide. `parameters` are the config's own unless given; `fraction` is the
        family's default for the part of a head that turns."""
        length = max_position or self.max_position()
        if parameters is None:
            parameters = self.mapping("rope_parameters") or self.mapping("rope_scaling")
        return read_rope(self.raw, dict(parameters), head_dim, length, fraction)


def read_rope(
    raw: Mapping[str, Any], parameters: dict[str, Any], head_dim: int, max_position: int, fraction: float = 1.0
) -> RopeConfig:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    share = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    dim = int(head_dim * float(fraction if share is None else share))
    if kind in ("llama3", "yarn", "longrope"):
        # Some configs keep the pretraining length outside the rope section; where both exist that one wins.
        outside = raw.get("original_max_position_embeddings")
        inside = parameters.get("original_max_position_embeddings", max_position)
        parameters["original_max_position_embeddings"] = outside or inside
    rope = RopeConfig(kind, float(theta), dim, max_position, parameters)
    _check_rope(rope)
    return rope


def _check_rope(rope: RopeConfig) -> None:
    """What would otherwise fail in the middle of loading."""
    required = ROPE_PARAMETERS.get(rope.kind)
    if required is None:
        raise UnsupportedModel(
            f"config.json: rope type {rope.kind!r} is not known",
            cause=f"known are {', '.join(ROPE_PARAMETERS)}",
            fix="--model-impl transformers",
        )
    if missing := [name for name in required if rope.parameters.get(name) is None]:
        raise bad_config(f"rope type {rope.kind} needs {', '.join(missing)}")
    if rope.dim < 2 or rope.dim % 2:
        raise bad_config(f"the rotary embedding turns {rope.dim} dimensions of a head, which are no pairs")
    for name in ("short_factor", "long_factor", "factors"):
        factors = rope.parameters.get(name)
        if factors is not None and len(factors) != rope.dim // 2:
            raise bad_config(f"rope {name} has {len(factors)} entries, expected {rope.dim // 2}")


def bad_config(message: str) -> BadCheckpoint:
    return BadCheckpoint(f"config.json: {message}", fix="fetch config.json of the model again")


def _positive(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_config(f"{key} is {value!r:.80}, expected a positive integer")
    most = MOST_LAYERS if "layer" in key else LARGEST_SIZE
    if value > most:
        raise bad_config(f"{key} is {value!r:.80}, which no model has: at most {most:,}")
    return value
