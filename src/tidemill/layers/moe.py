"""A mixture of experts: only the experts a token is routed to are computed for it.

Knows how experts are chosen; how the chosen ones are computed is `ops.kernels.mix_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tidemill.layers.linear import Linear
from tidemill.layers.mlp import Mlp
from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.spec import MoeSpec
from tidemill.ops import kernels, reference
from tidemill.quant.packing import Matrix


class Expert:
    """One expert of a mixture whose matrices are packed."""

    def __init__(self, spec: MoeSpec, prefix: str, expert: int, width: int, place: Placement) -> None:
        names = [f"{prefix}.{name.format(expert=expert)}" for name in spec.up]
        down = {f"{prefix}.{spec.down.format(expert=expert)}": width}
        self.activation = spec.activation
        self.up = Linear(width, dict.fromkeys(names, spec.inner), bias=False, place=place, use="expert")
        self.down = Linear(spec.inner, down, bias=False, place=place, use="expert")

    def parameters(self) -> Iterator[Parameter]:
        yield from self.up.parameters()
        yield from self.down.parameters()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up.gated(x, self.activation))


class Moe:
    def __init__(self, spec: MoeSpec, prefix: str, width: int, place: Placement) -> None:
        self.spec, self.prefix = spec, prefix
        # Routing decides which experts run: it is worth float32 everywhere.
        self.router = place.empty(spec.experts, width, dtype=torch.float32)
        self.choice_bias = None
        if spec.choice_bias is not None:
            self.choice_bias = place.empty(spec.experts, dtype=torch.float32)
        self.experts: list[Expert] = []
        self.up = self.down = place.empty(0)
        names = [f"{prefix}.{name.format(expert=0)}.weight" for name in spec.up]
        if any(place.packing.scheme(Matrix(name, spec.inner, width, "expert")) for name in names):
            self.experts = [Expert(spec, prefix, expert, width, place) for expert in range(spec.experts)]
        else:
            self.up = place.empty(spec.experts, 2 * spec.inner, width)
            self.down = place.empty(spec.experts, width, spec.inner)
        self.shared = None if spec.shared is None else Mlp(spec.shared, prefix, width, place)
        self.shared_gate = None
        if spec.shared_gate is not None:
            self.shared_gate = Linear(width, {f"{prefix}.{spec.shared_gate}": 1}, bias=False, place=place)

    def parameters(self) -> Iterator[Parameter]:
        spec = self.spec
        yield Parameter(f"{self.prefix}.{spec.router}.weight", self.router)
        if self.choice_bias is not None:
            yield Parameter(f"{self.prefix}.{spec.choice_bias}", self.choice_bias)
        for packed in self.experts:
            yield from packed.parameters()
        for expert in range(0 if self.experts else spec.experts):
            gate, up = (f"{self.prefix}.{name.format(expert=expert)}.weight" for name in spec.up)
            yield Parameter(gate, self.up[expert, : spec.inner])
            yield Parameter(up, self.up[expert, spec.inner :])
            yield Parameter(f"{self.prefix}.{spec.down.format(expert=expert)}.weight", self.down[expert])
        for part in (self.shared, self.shared_gate):
            if part is not None:
                yield from part.parameters()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        experts, weights = self._route(x)
        weights = weights.to(x.dtype)
        if self.experts:
            out = reference.mix(x, experts, weights, len(self.experts), lambda expert, x: self.experts[expert](x))
        else:
            out = kernels.mix_experts(x, experts, weights, self.up, self.down, self.spec.activation)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per token, `top_k` experts and their weights."""
        spec = self.spec
        if kernels.use_triton(x):
            from tidemill.ops.triton import routing

            logits = routing.expert_logits(x, self.router)
            if spec.groups == 1 and spec.experts <= routing.MOST_EXPERTS:
                return routing.route(
                    logits, spec.top_k, spec.scoring, spec.renormalise, spec.scaling, self.choice_bias, x.dtype
                )
        else:
            logits = reference.linear(x.float(), self.router)
        scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(dim=-1)
        choice = scores if self.choice_bias is None else scores + self.choice_bias
        if spec.groups > 1:
            choice = self._only_best_groups(choice)
        weights, experts = choice.topk(spec.top_k, dim=-1)
        if self.choice_bias is not None:
            weights = scores.gather(1, experts)
        if spec.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights if spec.scaling == 1.0 else weights * spec.scaling

    def _only_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        grouped = choice.view(len(choice), spec.groups, -1)
        if spec.group_score == "best":
            of_group = grouped.amax(dim=-1)
        else:
            of_group = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = of_group.topk(spec.top_groups, dim=-1).indices
        left_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, kept, False)
        # A learned bias may push scores below zero, so zero would not keep them out.
        return grouped.masked_fill(left_out[..., None], float("-inf")).view_as(choice)
