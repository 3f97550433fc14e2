"""What a chat template reads, found in its syntax tree: variables, fields of messages, and the shape of content.

A value that a template never reads has no effect, and this is how that is known before rendering. Content parts are
told the way vLLM does it: a template that loops over a message's content takes lists of parts, any other takes text.
Does not render.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jinja2 import meta, nodes

from tidemill.text.template_environment import environment

ContentFormat = Literal["string", "openai"]
Kind = Literal["messages", "message", "content"]

# Filters whose result is still the same list; others turn it into a text or a number.
_KEEP_LISTS = frozenset({"list", "reverse", "selectattr", "rejectattr", "select", "reject", "sort", "default", "d"})
_PICK_ONE = frozenset({"first", "last"})


@dataclass(frozen=True, slots=True)
class Reading:
    variables: frozenset[str]
    """Names taken from outside."""
    words: frozenset[str]
    """Every attribute and every quoted word: a field that is not among them is not looked at."""
    content_format: ContentFormat
    tells_text_from_parts: bool
    """Whether it asks if content is a string, and so takes both."""


def read_template(source: str) -> Reading:
    made = environment()
    tree = made.parse(source)
    holders = _Holders(tree)
    iterates = any(holders.kind_of(loop.iter) == "content" for loop in tree.find_all(nodes.For))
    asks = any(test.name == "string" and holders.kind_of(test.node) == "content" for test in tree.find_all(nodes.Test))
    return Reading(
        variables=frozenset(_variables(tree) - made.globals.keys()),
        words=frozenset(_words(tree)),
        content_format="openai" if iterates else "string",
        tells_text_from_parts=asks,
    )


def _variables(tree: nodes.Template) -> set[str]:
    """Names that are read before they are set, or asked for with `is defined`.

    jinja2 also counts a name that is set in each branch of an `if` and read behind it, which is the template's own.
    """
    first: dict[str, str] = {}
    for name in _in_order(tree):
        first.setdefault(name.name, name.ctx)
    asked = {test.node.name for test in tree.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
    return {name for name in meta.find_undeclared_variables(tree) if first.get(name) != "store" or name in asked}


def _in_order(node: nodes.Node) -> Iterator[nodes.Name]:
    """The names as they are come across: in an assignment, what is read before what is set."""
    if isinstance(node, nodes.Name):
        yield node
    children = list(node.iter_child_nodes())
    for child in reversed(children) if isinstance(node, nodes.Assign) else children:
        yield from _in_order(child)


def _words(tree: nodes.Template) -> Iterator[str]:
    for attribute in tree.find_all(nodes.Getattr):
        yield attribute.attr
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


class _Holders:
    """Which names hold the messages, one message, or its content. Scopes are not told apart: names are not reused."""

    def __init__(self, tree: nodes.Template) -> None:
        self._kinds: dict[str, Kind] = {"messages": "messages"}
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        known = 0
        # A name may be filled from one that is found to hold something only later.
        while known < len(self._kinds):
            known = len(self._kinds)
            for assignment in tree.find_all(nodes.Assign):
                self._learn(assignment.target, self.kind_of(assignment.node))
                self._learn_namespace(assignment)
            for loop in tree.find_all(nodes.For):
                if self.kind_of(loop.iter) == "messages":
                    self._learn(loop.target, "message")
            for call in tree.find_all(nodes.Call):
                if isinstance(call.node, nodes.Name) and call.node.name in macros:
                    self._learn_arguments(call, macros[call.node.name])

    def kind_of(self, node: nodes.Node | None) -> Kind | None:
        match node:
            case nodes.Name():
                return self._kinds.get(node.name)
            case nodes.Getattr():
                return self._kinds.get(_path(node) or "") or self._member(node.node, node.attr)
            case nodes.Getitem(arg=nodes.Slice()):
                return self.kind_of(node.node)
            case nodes.Getitem():
                return self._member(node.node, node.arg.value if isinstance(node.arg, nodes.Const) else None)
            case nodes.Call(node=nodes.Getattr(node=owner, attr="get"), args=[nodes.Const(value=key), *_]):
                return self._member(owner, key)
            case nodes.Filter():
                kind = self.kind_of(node.node)
                if node.name in _PICK_ONE:
                    return "message" if kind == "messages" else None
                return kind if node.name in _KEEP_LISTS else None
            case nodes.CondExpr():
                return self.kind_of(node.expr1) or self.kind_of(node.expr2)
            case nodes.Or() | nodes.Add():
                return self.kind_of(node.left) or self.kind_of(node.right)
        return None

    def _member(self, owner: nodes.Node, key: object) -> Kind | None:
        kind = self.kind_of(owner)
        if kind == "message":
            return "content" if key == "content" else None
        # Anything that is picked out of the messages, by whatever number, is one of them.
        return "message" if kind == "messages" and not isinstance(key, str) else None

    def _learn(self, target: nodes.Node, kind: Kind | None) -> None:
        name = _path(target)
        if kind is not None and name is not None:
            self._kinds.setdefault(name, kind)

    def _learn_namespace(self, assignment: nodes.Assign) -> None:
        match assignment:
            case nodes.Assign(target=nodes.Name(name=name), node=nodes.Call(node=nodes.Name(name="namespace")) as made):
                for keyword in made.kwargs:
                    self._learn(nodes.NSRef(name, keyword.key), self.kind_of(keyword.value))

    def _learn_arguments(self, call: nodes.Call, macro: nodes.Macro) -> None:
        for parameter, argument in zip(macro.args, call.args, strict=False):
            self._learn(parameter, self.kind_of(argument))
        for keyword in call.kwargs:
            self._learn(nodes.Name(keyword.key, "load"), self.kind_of(keyword.value))


def _path(node: nodes.Node) -> str | None:
    """A name, or a name in a namespace: `message`, `ns.messages`."""
    match node:
        case nodes.Name():
            return node.name
        case nodes.NSRef():
            return f"{node.name}.{node.attr}"
        case nodes.Getattr(node=nodes.Name(name=owner)):
            return f"{owner}.{node.attr}"
    return None
