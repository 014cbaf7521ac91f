"""The report's graph, as a networkx graph and as DOT.

networkx: one node for each node of the boundary program. Node attributes: op, region ("input", "forward", "backward",
"gradient sync", "clipping", "optimizer", "other"), module (path, "" for none), line ("file:line", "" for none),
shape (tuple), dtype, bytes, parameter (name, "" for none), bucket (number of the all-reduce that it is or feeds, -1 for
none), programs (tuple of program names). Edge attribute: bytes, of the value that flows.
"""

from __future__ import annotations

import networkx as nx
import pydot

from gradsync_fx.inspection.data import ReportData


COLOURS = {
    "input": "#e5e7eb",
    "forward": "#bfdbfe",
    "backward": "#c7d2fe",
    "gradient sync": "#fdba74",
    "optimizer": "#bbf7d0",
    "clipping": "#fca5a5",
    "other": "#fde68a",
}


def to_networkx(report: ReportData) -> nx.DiGraph:
    """A `networkx.DiGraph`; see the module's text for its attributes."""
    graph: nx.DiGraph = nx.DiGraph(step=report.step, k=report.k, world_size=report.world_size)
    bucket = {name: c.bucket for c in report.collectives for name in c.nodes}
    for node in report.graph:
        graph.add_node(
            node.name,
            op=node.op,
            region=node.region,
            module=node.module,
            line=node.line,
            shape=node.shape,
            dtype=node.dtype,
            bytes=node.bytes,
            parameter=node.parameter,
            bucket=bucket.get(node.name, -1),
            programs=node.programs,
        )
    for node in report.graph:
        for source in node.inputs:
            graph.add_edge(source, node.name, bytes=graph.nodes[source]["bytes"])
    return graph


def to_dot(report: ReportData) -> str:
    """Text for graphviz: regions by colour, modules as clusters."""
    graph = pydot.Dot("step", graph_type="digraph", rankdir="TB", fontname="sans-serif")
    graph.set_node_defaults(shape="box", style="filled", fontname="sans-serif", fontsize="10")
    clusters: dict[str, pydot.Cluster] = {}
    for node in report.graph:
        made = pydot.Node(
            pydot.quote_id_if_necessary(node.name),
            label=_quoted(
                f"{node.parameter or node.name}\n{node.op}\n{_dtype_and_shape(node.shape, node.dtype)}"
            ),
            fillcolor=_quoted(COLOURS[node.region]),
            tooltip=_quoted(node.line or node.region),
        )
        if not node.module:
            graph.add_node(made)
            continue
        if node.module not in clusters:
            name = f"module_{len(clusters)}"
            clusters[node.module] = pydot.Cluster(name, label=_quoted(node.module))
        clusters[node.module].add_node(made)
    for cluster in clusters.values():
        graph.add_subgraph(cluster)  # type: ignore[arg-type]  # its stubs keep the two apart
    for node in report.graph:
        for source in node.inputs:
            graph.add_edge(pydot.Edge(source, node.name))
    text: str = graph.to_string()
    return text


def _dtype_and_shape(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]" if dtype else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
