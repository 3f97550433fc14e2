"""Rewrites the syntax tree of a chat template so that whatever it runs is counted.

Loops, macros and blocks count each turn before it starts, by the size of their bodies; the operations that jinja2 lets
nobody intercept (`~`, slices, comparisons, keys) become calls of checked functions. Those are filters under names that
no template can write. Does not know what is counted, or how much is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from tidemill.text.template_budget import check_bits

TICK = "tick of "
JOINED, SLICED, CHECKED = "joined texts", "sliced value", "checked value"
# A turn costs at least this many steps, so that empty bodies are bounded by the time they take too.
LEAST_STEPS = 32

_Bodied = nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block


def metered(tree: nodes.Template, environment: Any) -> tuple[nodes.Template, set[int]]:
    """The tree, changed in place, and the numbers of steps its turns take: each is a filter, `tick of N`."""
    transformer = _Metering()
    transformer.visit(tree)
    tree.set_environment(environment)
    return tree, transformer.weights


class _Metering(NodeTransformer):
    def __init__(self) -> None:
        self.weights: set[int] = set()

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._count_turns(node)
        if node.test is not None:
            # A loop that skips everything has no body to count in.
            node.test = nodes.And(self._tick(LEAST_STEPS, node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._count_turns(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._count_turns(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Block:
        return self._count_turns(node)

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        if isinstance(node.value, int):
            check_bits(node.value.bit_length())
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), JOINED)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filtered(node.node, SLICED, [nodes.Const(None) if end is None else end for end in ends])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        small = _is_small(node.expr) or _is_small(node.ops[0].expr)
        looks_inside = any(operand.op in ("in", "notin") for operand in node.ops)
        self.generic_visit(node)
        if len(node.ops) == 1 and (_is_small(node.ops[0].expr) if looks_inside else small):
            # Compared with a word or a number of the template, which takes no time whatever the other side is.
            return node
        node.expr = _checked(node.expr)
        for operand in node.ops:
            operand.expr = _checked(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _checked(node.key)
        return node

    def _count_turns(self, node: Any) -> Any:
        weight = max(LEAST_STEPS, sum(map(_size, node.body)))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._tick(weight, node.lineno), lineno=node.lineno))
        return node

    def _tick(self, steps: int, lineno: int) -> nodes.Filter:
        self.weights.add(steps)
        return _filtered(nodes.Const(None, lineno=lineno), f"{TICK}{steps}")


def _filtered(value: nodes.Expr, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(value, name, args or [], [], None, None, lineno=value.lineno)


def _checked(value: nodes.Expr) -> nodes.Expr:
    return value if _is_small(value) else _filtered(value, CHECKED)


def _is_small(node: nodes.Expr) -> bool:
    """Whether a value is a word, a number, a truth, or a list of those."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const | nodes.Compare | nodes.Test | nodes.Not)


def _size(node: nodes.Node) -> int:
    return 1 + sum(map(_size, _children(node)))


def _children(node: nodes.Node) -> Iterator[nodes.Node]:
    """Without the bodies that count their own turns."""
    yield from node.iter_child_nodes(exclude=("body",) if isinstance(node, _Bodied) else None)
