"""Runs graphs on terms in place of tensors: what every input holds in the end, what is returned, what was sent.

add(acc, mm(a, b)), copy_(acc, .)     memory of acc: add(input 3, mm(input 0, input 1))
add_product(acc, a, b)                the same term, though acc is written in place

A graph is run as eager would run it: values have memory, views read the memory below them as it is at that moment, and
a write changes what every later read sees. Equal terms are one object. Two programs that leave the same terms in the
same inputs compute the same from them, in whatever order, and with whatever writes in place. The rewrites of fuse.py,
norms.py, overlap.py and device_numbers.py are the only equations that it knows; what it does not know is different.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsync_fx.comm.arrivals import ARRIVE
from gradsync_fx.comm.flat_buffers import stretches
from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS
from gradsync_fx.comm.inplace_pieces import GATHER_PIECES, START_PIECES
from gradsync_fx.ir import ops
from gradsync_fx.ir.memory import viewed, written
from gradsync_fx.ir.ops import argument
from gradsync_fx.passes.blocks import RUN_BLOCK
from gradsync_fx.passes.fuse import ADD_PRODUCT
from gradsync_fx.passes.join_updates import JOINED
from gradsync_fx.passes.norms import scales_norms, stacked
from gradsync_fx.passes.spelled_pieces import cuts_of, spelled_gather, spelled_scatter
from gradsync_fx.passes.terms import CAST, OWN_PIECE, Term, Terms, constant


_aten = torch.ops.aten


class Fault(Exception):
    """A read or write that no order of the program allows."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value: a piece of memory, and the views through which it is seen."""

    root: int
    path: tuple[tuple[Any, tuple[Any, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class SumsUnderWay:
    """A reduction in place that is under way, and what its sums hold once it has been waited for."""

    reduced: dict[int, Term]


class Machine:
    """Memory, and what has been done to the world outside of it: `sent` collectives, `waited` ones, other `effects`."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.memory: dict[int, Term] = {}
        self.sent: Counter[Term] = Counter()
        self.waited: Counter[Term] = Counter()
        self.effects: Counter[Term] = Counter()
        self.under_way: dict[int, SumsUnderWay] = {}
        self.away: set[int] = set()  # parameters that may be on their way
        self._pending: set[int] = set()  # results of functional collectives
        self._arrived: set[Ref] = set()
        self._gathered: dict[Ref, Term] = {}  # parameters, until the last of them
        self._random = 0

    def bind(self, term: Term) -> Ref:
        """New memory that holds a term."""
        root = len(self.memory)
        self.memory[root] = term
        return Ref(root)

    def read(self, ref: Ref) -> Term:
        """What a value is now."""
        self._check_there(ref, "read")
        if ref.root in self._pending and not self._has_arrived(ref):
            raise Fault("the result of a collective is read before its wait")
        term = self.memory[ref.root]
        for op, args in ref.path:
            term = self.terms.of(op, (term, *args), {})
        return term

    def _check_there(self, ref: Ref, done: str) -> None:
        if ref.root in self.under_way:
            raise Fault(f"it is {done} while its reduction is under way")
        if ref.root in self.away:
            raise Fault(f"a parameter is {done} before it has arrived")

    def _has_arrived(self, ref: Ref) -> bool:
        cuts = range(len(ref.path) + 1)
        return any(Ref(ref.root, ref.path[:n]) in self._arrived for n in cuts)

    def write(self, ref: Ref, term: Term) -> None:
        """A write in place. Zeros are zeros, of whatever shape they are spread from."""
        self._check_there(ref, "written")
        if term.op is _aten.full.default:
            term = self.terms.make("filled", term.args[1])
        if ref.path:
            term = self.terms.make("write", self.memory[ref.root], ref.path, term)
        self.memory[ref.root] = term

    def run(self, module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Runs a graph; returns its outputs, as values (or constants)."""
        given = iter(inputs)
        env: dict[Node, Any] = {}
        for node in module.graph.nodes:
            try:
                if node.op == "placeholder":
                    env[node] = next(given)
                elif node.op == "get_attr":
                    env[node] = self.bind(self.terms.make("constant", id(_attribute(module, node))))
                elif node.op == "call_module":
                    body: Any = module.get_submodule(str(node.target))
                    env[node] = self.run(body, [env[n] for n in node.args])
                elif node.op == "call_function":
                    env[node] = self._call(node, env)
            except Fault as fault:
                raise Fault(f"{node.name}: {fault}") from None
        (out,) = module.graph.find_nodes(op="output")
        return [env[v] if isinstance(v, Node) else v for v in out.args[0]]

    def _call(self, node: Node, env: dict[Node, Any]) -> Any:
        target = node.target
        if target is operator.getitem and not isinstance(env[argument(node, 0)], Ref):
            return env[argument(node, 0)][argument(node, 1)]  # a body's results
        if target is START_SUMS:
            return self._start(node, [env[n] for n in argument(node, 0)])
        if target is WAIT_SUMS:
            return self.wait_sums([env[n] for n in argument(node, 0)])
        if target is START_PIECES:
            return self._start_pieces(node, [env[n] for n in argument(node, 0)])
        if target is GATHER_PIECES:
            pieces, parameters = ([env[n] for n in argument(node, i)] for i in (1, 0))
            return self._gather_pieces(node, pieces, parameters)
        if target is ARRIVE:
            return self.away.difference_update(env[n].root for n in argument(node, 0))
        if target is JOINED:
            return [self.bind(self.read(env[n])) for n in argument(node, 0)]
        if scales_norms(node):
            return self.bind(stacked(self.terms, self.read(env[argument(node, 0)])))
        if target is RUN_BLOCK:
            given = [env[n] for i in (1, 2) for n in argument(node, i)]
            return self.run(node.meta["block"].module, given)
        if target is ops.WAIT:
            return self._wait(env[argument(node, 0)])
        if target is _aten.copy_.default:
            self.write(env[argument(node, 0)], self.read(env[argument(node, 1)]))
            return env[argument(node, 0)]
        if target is ADD_PRODUCT:
            total, a, b = (self.read(env[n]) for n in node.args)  # type: ignore[index]
            held, factor = (n.meta["val"].dtype for n in node.args[:2])  # type: ignore[union-attr]
            product = self._cast(self.terms.make(_aten.mm.default, a, b), factor, held)
            self.write(env[argument(node, 0)], self.terms.make(_aten.add.Tensor, total, product))
            return None
        if target is _aten.clone.default and not any(u.op == "output" for u in node.users):
            # Inductor takes it out, and reads what was copied in its place.
            return env[argument(node, 0)]
        if viewed(target) == 0 and not node.kwargs:
            whole = env[argument(node, 0)]
            step = (target, tuple(self._frozen(a, env) for a in node.args[1:]))
            return Ref(whole.root, (*whole.path, step))
        return self._plain(node, env)

    def _plain(self, node: Node, env: dict[Node, Any]) -> Any:
        args = tuple(self._frozen(a, env) for a in node.args)
        kwargs = {k: self._frozen(v, env) for k, v in node.kwargs.items()}
        target: Any = node.target
        tags = getattr(target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            kwargs["drawn as"] = (int, self._random)
            self._random += 1
        term = self.terms.of(target, args, kwargs)
        for index in written(target):
            if index < len(node.args) and isinstance(node.args[index], Node):
                self.write(env[node.args[index]], self.terms.make("written by", term, index))  # type: ignore[index]
        result = self.bind(term)
        if ops.is_collective(node):
            self.sent[term] += 1
            self._pending.add(result.root)
        elif not node.users and node.is_impure(impure_random=False):
            self.effects[term] += 1
        return result

    def _frozen(self, value: Any, env: dict[Node, Any]) -> Any:
        if isinstance(value, Node):
            held = env[value]
            return self.read(held) if isinstance(held, Ref) else constant(held)
        if isinstance(value, list | tuple):
            return tuple(self._frozen(v, env) for v in value)
        if isinstance(value, dict):
            return tuple((k, self._frozen(v, env)) for k, v in sorted(value.items()))
        return constant(value)

    def _wait(self, ref: Ref) -> Ref:
        if ref in self._arrived:
            raise Fault("a collective is waited for twice")
        self._arrived.add(ref)
        term = self.read(ref)
        self.waited[term] += 1
        return self.bind(self.terms.make(ops.WAIT, term))

    def _start(self, node: Node, sums: list[Ref]) -> None:
        """As passes/bucket.py spells it out: cat -> all_reduce -> wait -> slices."""
        _, op, group, wire = node.args
        values = [n.meta["val"] for n in argument(node, 0)]
        pieces = [
            self.terms.of(_aten.reshape.default, (self._cast(self.read(s), v.dtype, wire), ((int, -1),)), {})
            for s, v in zip(sums, values, strict=True)
        ]  # fmt: skip
        sizes = stretches(values)
        for i, (value, size) in enumerate(zip(values, sizes, strict=True)):
            if size > value.numel():
                gap = tuple(map(constant, (0, size - value.numel())))
                pieces[i] = self.terms.make(_aten.constant_pad_nd.default, pieces[i], gap)
        flat = pieces[0] if len(pieces) == 1 else self.terms.make(_aten.cat.default, tuple(pieces))
        sent = self.terms.make(ops.ALL_REDUCE, flat, constant(op), constant(group))
        self.sent[sent] += 1
        self.waited[sent] += 1  # or `finish` finds it under way
        arrived, start = self.terms.make(ops.WAIT, sent), 0
        bucket = SumsUnderWay({})
        for ref, value, size in zip(sums, values, sizes, strict=True):
            end = start + value.numel()
            ends = tuple(map(constant, (0, start, end)))
            piece = self.terms.make(_aten.slice.Tensor, arrived, *ends)
            shape = tuple(map(constant, value.shape))
            whole = self.terms.make(_aten.reshape.default, piece, shape)
            bucket.reduced[ref.root] = self._cast(whole, wire, value.dtype)
            start += size
        self._under_way(bucket, sums)

    def _start_pieces(self, node: Node, sums: list[Ref]) -> None:
        """When it is waited for, this rank's pieces of the sums are there, and nothing else of them."""
        cuts, bucket = cuts_of(node), SumsUnderWay({})
        pieces = self.run(spelled_scatter(node), sums)
        for ref, piece, bounds in zip(sums, pieces, cuts.bounds, strict=True):
            ends = map(constant, (0, *bounds[cuts.rank : cuts.rank + 2]))
            bucket.reduced[ref.root] = self.terms.make(OWN_PIECE, self.read(piece), *ends)
        self._under_way(bucket, sums)

    def _gather_pieces(self, node: Node, pieces: list[Ref], parameters: list[Ref]) -> None:
        """Parameters are there with the last of these ops."""
        for ref, value in zip(parameters, self.run(spelled_gather(node), pieces), strict=True):
            self._check_there(ref, "gathered")
            self._gathered[ref] = self.read(value)
            self.away.add(ref.root)
        if argument(node, 4):
            self.away.difference_update(ref.root for ref in self._gathered)
            for ref, term in self._gathered.items():
                self.write(ref, term)
            self._gathered.clear()

    def _under_way(self, bucket: SumsUnderWay, sums: list[Ref]) -> None:
        if len(bucket.reduced) < len(sums):
            raise Fault("a sum stands twice in one bucket")
        self.under_way.update(dict.fromkeys(bucket.reduced, bucket))

    def _cast(self, term: Term, held: Any, wanted: Any) -> Term:
        if held is wanted:
            return term
        return self.terms.of(CAST, (term, constant(wanted)), {})

    def wait_sums(self, sums: list[Ref]) -> None:
        """The sums of a bucket that was started hold what all ranks' do together."""
        found = [self.under_way.pop(ref.root, None) for ref in sums]
        bucket = found[0]
        if bucket is None:
            raise Fault("a bucket is waited for that is not under way")
        if any(f is not bucket for f in found) or len(sums) != len(bucket.reduced):
            raise Fault("a wait that is not for the sums of one bucket")
        self.memory.update(bucket.reduced)

    def finish(self) -> None:
        """Raises `Fault` where something is still under way."""
        if self.under_way:
            raise Fault("a reduction is started and never waited for")
        if self._gathered:
            raise Fault("parameters are gathered, and the last of them never")


def _attribute(module: GraphModule, node: Node) -> Any:
    return operator.attrgetter(str(node.target))(module)
