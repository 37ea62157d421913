"""Mutants: a module's source with one small change each, which some test should notice.

The changes are mutmut's: operators, numbers, arguments, keywords, assignments, text. mutmut's own
runner cannot be used: torch.compile cannot trace its trampolines, and it leaves out every decorated
function. What no test of behaviour on a CPU can notice is left out here: annotations and types,
decorators, the wording of errors, `assert`, the arguments in `UNSEEN`, calls of `torch.cuda` and
what runs only where a condition finds CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

# Arguments that guard against a mistake, or concern a GPU alone.
UNSEEN = {"strict", "device", "non_blocking", "pin_memory"}
_LEFT_OUT = (cst.Annotation, cst.Assert, cst.Decorator, cst.Import, cst.ImportFrom, cst.Raise)


class Mutant(NamedTuple):
    """One change of a module."""

    module: cst.Module
    node: cst.CSTNode
    changed: cst.CSTNode
    lines: range  # of the statement that it is in, from 1
    in_function: bool  # else it is run once, where the module is imported

    def source(self) -> str:
        """The changed module."""
        mutated = self.module.deep_replace(self.node, self.changed)
        assert isinstance(mutated, cst.Module)
        return mutated.code

    def __str__(self) -> str:
        texts = (self.module.code_for_node(node) for node in (self.node, self.changed))
        return " → ".join(" ".join(text.split()) for text in texts)


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its source."""
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    visitor = _Visitor(wrapper.module)
    wrapper.visit(visitor)
    return visitor.found


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self._module = module
        self._statement: cst.CSTNode | None = None
        self._functions = 0  # whose bodies the node is in
        self._cuda = 0  # parts, which run on a GPU alone, that it is in
        self.found: list[Mutant] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _LEFT_OUT) or _is_alias(node) or _is_unseen(node):
            return False
        if self._cuda or _calls_cuda(node):
            return False
        if isinstance(node, cst.SimpleStatementLine):
            self._statement = node
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                place = self.get_metadata(PositionProvider, self._statement or node)
                lines = range(place.start.line, place.end.line + 1)
                for changed in _changes(operator, node):
                    inside = self._functions > 0
                    self.found.append(Mutant(self._module, node, changed, lines, inside))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if original_node is self._statement:
            self._statement = None

    def on_visit_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        self._functions += isinstance(node, cst.FunctionDef) and attribute == "body"
        self._cuda += attribute == "body" and _needs_cuda(node)

    def on_leave_attribute(self, original_node: cst.CSTNode, attribute: str) -> None:
        self._functions -= isinstance(original_node, cst.FunctionDef) and attribute == "body"
        self._cuda -= attribute == "body" and _needs_cuda(original_node)


def _changes(
    operator: Callable[[Any], Iterable[cst.CSTNode]], node: cst.CSTNode
) -> Iterator[cst.CSTNode]:
    for changed in operator(node):
        if isinstance(node, cst.Call) and isinstance(changed, cst.Call):
            kept = {id(argument) for argument in changed.args}
            if any(_is_unseen(argument) and id(argument) not in kept for argument in node.args):
                continue
        yield changed
        if operator is operator_string:
            return  # the other changes are the same text in small and in capital letters


def _is_unseen(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value in UNSEEN


def _calls_cuda(node: cst.CSTNode) -> bool:
    if not isinstance(node, cst.Call):
        return False
    called = _text(node.func)
    return called.startswith("torch.cuda.") and called != "torch.cuda.is_available"


def _needs_cuda(node: cst.CSTNode) -> bool:
    """``if`` as a statement or in an expression, and as part of its condition, that CUDA is there.

    Its condition is changed all the same: it shows on a CPU whether it is false.
    """
    if isinstance(node, cst.If | cst.IfExp):
        return _needs_cuda(node.test)
    if isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.And):
        return _needs_cuda(node.left) or _needs_cuda(node.right)
    found = isinstance(node, cst.Comparison | cst.Attribute | cst.Call)
    return found and _text(node).endswith((' == "cuda"', ".is_cuda", "torch.cuda.is_available()"))


def _text(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _is_alias(node: cst.CSTNode) -> bool:
    """A name for a type: ``Rows = NDArray[np.int64]``, ``T = TypeVar("T")``."""
    if not isinstance(node, cst.Assign) or not isinstance(node.targets[0].target, cst.Name):
        return False
    name, value = node.targets[0].target.value.lstrip("_"), node.value
    called = value.func if isinstance(value, cst.Call) else None
    return name[:1].isupper() and (
        (isinstance(value, cst.Subscript) and not name.isupper())
        or (isinstance(called, cst.Name) and called.value == "TypeVar")
    )
