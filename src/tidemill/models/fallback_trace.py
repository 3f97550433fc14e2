"""Runs a transformers model without its numbers, to learn what each layer asks of attention.

The model stands on torch's meta device: shapes without memory, so a pass over any size costs a second. What depends on
numbers (which experts are chosen, whether a length is reached) counts as zero or nothing. Knows no configs.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface

from tidemill.errors import UnsupportedModel
from tidemill.layers.spec import CacheShape
from tidemill.models.fallback_attention import read_arguments, refusal

TOKENS = 131
"""Of the traced pass: a prime that divides the size of no weight, which tells what grows with tokens from the rest."""
FAR = 1 << 22
"""A position farther out than any window reaches."""
ATTENTION_NAME = "tidemill-trace"
TENSORS_AT_ONCE = 4
"""Of a layer's widest tensors, how many are held at a time: gate, up, the activation of one and their product."""

MaskFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Traced:
    decoder: str
    """The submodule that turns token ids into hidden states; what comes after it is the output head."""
    vocab_size: int
    hidden_size: int
    widest_layer: int
    caches: tuple[CacheShape, ...]


def trace(build: Callable[[str], torch.nn.Module]) -> Traced:
    """`build` makes the model, on any device, with the attention implementation of this name."""
    recorder = _Recorder()
    with torch.device("meta"), torch.no_grad():
        model = build(recorder.name).eval()
        inputs = {
            "input_ids": torch.zeros(1, TOKENS, dtype=torch.long),
            "position_ids": torch.arange(TOKENS)[None],
            # Only where a mask is given does transformers not look at the numbers of the positions.
            "attention_mask": torch.ones(1, TOKENS, dtype=torch.long),
        }
        with _WithoutNumbers() as ops, _Parts(model, ops) as parts, recorder.watching(parts) as layers:
            logits = model(**inputs, use_cache=False).logits
    decoder = _decoder(model, layers)
    if ops.mixes_tokens:
        raise refusal("it runs a convolution over the tokens, whose state the cache of keys and values does not keep")
    made, widest = parts.results[decoder]
    return Traced(
        decoder=decoder,
        vocab_size=logits.shape[-1],
        hidden_size=made[0].shape[-1],
        widest_layer=TENSORS_AT_ONCE * widest,
        caches=tuple(_cache(layer) for layer in layers),
    )


def computes_attention_itself(name: str) -> UnsupportedModel:
    return refusal(f"{name} computes its attention itself, not through transformers' attention interface")


def _decoder(model: torch.nn.Module, layers: list[_Layer]) -> str:
    """The part of the model that all of its attention happens in."""
    found = sorted({layer.part for layer in layers})
    if not found:
        raise computes_attention_itself(type(model).__name__)
    if len(found) > 1:
        raise refusal(f"its layers stand in several parts: {', '.join(found)}")
    if "position_ids" not in inspect.signature(model.get_submodule(found[0]).forward).parameters:
        raise refusal("it counts positions itself and takes none, so sequences cannot share a batch")
    return found[0]


def window_of(mask_function: MaskFunction) -> int | None:
    """How many of the last positions a mask shows, None for all. Masks that are neither causal nor a window raise."""

    def shows(query: int, key: int) -> bool:
        zero, *indices = (torch.tensor(number) for number in (0, query, key))
        try:
            return bool(mask_function(zero, zero, *indices))
        except (IndexError, RuntimeError):
            cause = "what its attention sees depends on more than positions, as with attention in chunks"
            raise refusal(cause) from None

    window = None
    if not shows(FAR, 0):
        seen, unseen = 0, FAR
        while unseen - seen > 1:
            middle = (seen + unseen) // 2
            seen, unseen = (middle, unseen) if shows(FAR, FAR - middle) else (seen, middle)
        window = seen + 1
    reach = window or 64
    for query in (0, 1, reach - 1, reach, reach + 1, 5 * reach // 2, 3 * reach + 7):
        for key in (0, query // 2, query - reach - 1, query - reach, query - reach + 1, query, query + 1, query + 99):
            if key >= 0 and shows(query, key) != (query - reach < key <= query if window else key <= query):
                verb = "sees" if shows(query, key) else "does not see"
                raise refusal(f"its attention is neither causal nor a sliding window: position {query} {verb} {key}")
    return window


@dataclass(frozen=True)
class _Layer:
    """One call of the attention function."""

    part: str
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """As the layer names it; where there is a mask, this is what counts."""
    mask: MaskFunction | None


def _cache(layer: _Layer) -> CacheShape:
    window = layer.window if layer.mask is None else window_of(layer.mask)
    if layer.window is not None and layer.window != window:
        raise refusal(f"a layer names a window of {layer.window} positions, its mask shows {window or 'all'}")
    return CacheShape(layer.kv_heads, layer.key_dim, layer.value_dim, window)


class _Recorder:
    """Stands for attention and for the making of masks, and notes what each layer asks for. transformers keeps it for
    good, so it keeps nothing itself."""

    def __init__(self) -> None:
        self.name = f"{ATTENTION_NAME}-{uuid.uuid4().hex}"
        self._parts: _Parts | None = None
        self._layers: list[_Layer] = []
        self._masks: list[tuple[torch.Tensor, MaskFunction]] = []
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._mask)

    @contextmanager
    def watching(self, parts: _Parts) -> Iterator[list[_Layer]]:
        """A pass; the list fills with its layers."""
        self._parts, self._layers, self._masks = parts, [], []
        try:
            yield self._layers
        finally:
            self._parts, self._layers, self._masks = None, [], []

    def _mask(self, *, mask_function: MaskFunction, **_: Any) -> torch.Tensor:
        """A tensor that stands for the mask: a layer that receives this very one sees what its function shows."""
        mask = torch.empty(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
        self._masks.append((mask, mask_function))
        return mask

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        read_arguments(query, key, value, arguments)
        function = next((function for made, function in self._masks if made is attention_mask), None)
        if attention_mask is not None and function is None:
            raise refusal("it makes a mask of its own, and the paged attention has only causal ones and windows")
        causal = arguments.get("is_causal")
        if function is None and not (getattr(module, "is_causal", True) if causal is None else causal):
            raise refusal("it looks ahead: its attention is not causal")
        part = "" if self._parts is None else self._parts.running
        sizes = (key.shape[1], key.shape[3], value.shape[3])
        self._layers.append(_Layer(part, *sizes, arguments.get("sliding_window"), function))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


class _Parts:
    """Which part the model itself has called while a pass runs inside it, and what that made of its inputs."""

    def __init__(self, model: torch.nn.Module, ops: _WithoutNumbers) -> None:
        self.running = ""
        self.results: dict[str, tuple[Any, int]] = {}
        """What each part returned, and the numbers per token of the widest tensor until then."""
        self._model, self._ops = model, ops
        self._depth = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> _Parts:
        for name, module in self._model.named_modules():
            if name:
                self._hooks.append(module.register_forward_pre_hook(self._entering(name)))
                self._hooks.append(module.register_forward_hook(self._leaving))
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if self._depth == 0:
                self.running = name
            self._depth += 1

        return enter

    def _leaving(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.results[self.running] = (output, self._ops.widest)


class _WithoutNumbers(TorchDispatchMode):
    """Answers what only numbers could answer, and watches what a layer makes of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.widest = 0
        """Numbers per token of the largest tensor computed."""
        self.mixes_tokens = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self._answer(func, args, kwargs or {})
        is_new = isinstance(out, torch.Tensor) and func._schema.returns[0].alias_info is None
        if is_new and out.numel() % TOKENS == 0:
            self.widest = max(self.widest, out.numel() // TOKENS)
        return out

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        self.mixes_tokens |= name.startswith("convolution")
        of = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].is_meta else None
        if of is not None:
            if name == "_local_scalar_dense":
                return torch.zeros((), dtype=of.dtype, device="cpu").item()
            if name == "nonzero":
                return torch.empty(0, of.dim(), dtype=torch.long, device="meta")
            if name == "_to_copy" and torch.device(kwargs.get("device") or "meta").type != "meta":
                return torch.zeros(of.shape, dtype=kwargs.get("dtype") or of.dtype, device=kwargs["device"])
            if name == "_grouped_mm":
                # Without memory torch knows it for some types and sizes only.
                return of.new_empty(of.shape[0], args[1].shape[-1])
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        if len({tensor.is_meta for tensor in tensors}) == 2:
            # Tensors with numbers, such as constants of a module, meet those without.
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return func(*args, **kwargs)
