"""A script as libcst sees it: texts and lines of its nodes, what is around them, and what its names stand for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from gradsync_fx.conversion.names import canonical


LoopNode = cst.For | cst.While
Statements = Sequence[cst.BaseStatement]
OPTIMIZERS = re.compile(
    r"\boptim\.(?!lr_scheduler)\w+\(|\b(SGD|Adam|AdamW|RMSprop|Adagrad|NAdam|RAdam|Adamax|Lion|Adafactor)\(|"
    r"\bconfigure_optimizers\("
)
SCHEDULERS = re.compile(r"\blr_scheduler\.|\b\w*LR\(|\bget_\w*schedule\w*\(|\bget_scheduler\(")


class Unsure(Exception):
    """A loop is left as it is. at: the node that the reason is about."""

    def __init__(self, at: cst.CSTNode, why: str) -> None:
        super().__init__(why)
        self.at, self.why = at, why


class ScriptSource:
    """One script."""

    def __init__(self, text: str) -> None:
        self.wrapper = MetadataWrapper(cst.parse_module(text))
        self.module = self.wrapper.module
        self._parents = self.wrapper.resolve(ParentNodeProvider)
        self._positions = self.wrapper.resolve(PositionProvider)

    def text(self, node: cst.CSTNode) -> str:
        """As it is written, without blank lines and comments before it."""
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            node = node.with_changes(leading_lines=())
        return self.module.code_for_node(node)

    def short(self, node: cst.CSTNode) -> str:
        """An expression in its canonical spelling."""
        return canonical(self.text(node))

    def line(self, node: cst.CSTNode) -> int:
        """Where it begins; of a line that was split, its first statement."""
        while node not in self._positions:
            node = node.children[0]
        return int(self._positions[node].start.line)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What a node of the script stands in, from the inside."""
        while (node := self._parents.get(node)) is not None:  # type: ignore[assignment]
            yield node

    @cached_property
    def assigned(self) -> list[tuple[str, str]]:
        """Names with what is assigned to them, in the canonical spelling; all names of a tuple alike."""
        found: list[tuple[str, str]] = []
        for node in every(self.module, cst.Assign):
            for target in node.targets:
                found += [(name, self.short(node.value)) for name in _targets(target.target)]
        return found

    @cached_property
    def optimizers(self) -> set[str]:
        """Names of optimizers: by what makes them, or by how they are called."""
        made = {name for name, value in self.assigned if OPTIMIZERS.search(value)}
        return made | {n for n in self._names if re.fullmatch(r"opt(im|imizer)?\d*", n)}

    @cached_property
    def schedulers(self) -> set[str]:
        """Names of learning rate schedulers."""
        made = {name for name, value in self.assigned if SCHEDULERS.search(value)}
        return (made | {n for n in self._names if "sched" in n}) - self.optimizers

    @cached_property
    def models(self) -> set[str]:
        """Names of modules: those whose parameters are asked for, and wrappers of DDP."""
        text = self.module.code
        found = set(
            re.findall(r"\b(\w+)\.(?:parameters|no_sync|require_backward_grad_sync)\b", text)
        )
        found |= {n for n, v in self.assigned if re.search(r"\b(DDP|DistributedDataParallel)\(", v)}
        found |= set(re.findall(r"\.accumulate\(\s*(\w+)\s*\)", text))
        return found - {"self"}

    @cached_property
    def scalers(self) -> dict[str, str]:
        """Names of GradScalers, with what makes them."""
        return {name: value for name, value in self.assigned if "GradScaler(" in value}

    @cached_property
    def _names(self) -> set[str]:
        return {n.value for n in every(self.module, cst.Name)}


def every(node: cst.CSTNode, kind: type) -> list:
    """All nodes of a kind in and below a node, in the order of the text."""
    found = [node] if isinstance(node, kind) else []
    for child in node.children:
        found += every(child, kind)
    return found


def statements(body: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Each on its own: `a; b` is two."""
    found: list[cst.BaseStatement] = []
    for line in body:
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) > 1:
            comments = line.leading_lines
            for i, small in enumerate(line.body):
                alone = small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
                found.append(cst.SimpleStatementLine([alone], () if i else comments))
        else:
            found.append(line)
    return found


def block_of(node: cst.CSTNode) -> Sequence[cst.BaseStatement]:
    """The statements of a compound one."""
    body = node.body  # type: ignore[attr-defined]
    if not isinstance(body, cst.IndentedBlock):
        raise Unsure(node, "a block on the line of its head")
    return body.body


def _targets(node: cst.BaseExpression) -> list[str]:
    if isinstance(node, cst.Name):
        return [node.value]
    if isinstance(node, cst.Tuple | cst.List):
        return [name for e in node.elements for name in _targets(e.value)]
    return []
