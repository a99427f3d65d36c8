"""How many actors a Ray cluster has room for, and on which nodes; by default one on each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.errors import BackendError


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster: its id, its address, and its resources in all."""

    identity: str
    name: str
    n_cpus: float
    n_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """`n_actors` actors on these nodes, each with these numbers of CPUs and GPUs."""

    n_actors: int
    nodes: tuple[Node, ...]
    cpus: float
    gpus: float
    notes: tuple[str, ...] = ()


def place(nodes: Sequence[Node], n_lines: int, cpus: float | None, gpus: float | None) -> Placement:
    """Place as many actors with `cpus` CPUs and `gpus` GPUs as the nodes have room for, at most one a line.

    None takes all that the largest node has, so that each node of its size has one actor; if `gpus` is
    given, None divides the CPUs among that node's actors. Raise `BackendError` if no node has enough.
    """
    if not nodes:
        raise BackendError("the Ray cluster has no node")
    n_gpus = max(node.n_gpus for node in nodes) if gpus is None else gpus
    able = [node for node in nodes if node.n_gpus >= n_gpus]
    n_cpus = cpus
    if n_cpus is None and able:
        largest = max(able, key=lambda node: node.n_cpus)
        n_actors = max(1, int(largest.n_gpus // gpus)) if gpus else 1
        n_cpus = largest.n_cpus if n_actors == 1 else float(largest.n_cpus // n_actors)
    found = [(node, _room(node, n_cpus or 0.0, n_gpus)) for node in nodes]
    used = tuple(node for node, n in found if n)
    if not used or (not n_cpus and not n_gpus):
        most = max(nodes, key=lambda node: (node.n_gpus, node.n_cpus))
        raise BackendError(
            f"no Ray node has {_said(n_cpus or 1.0, n_gpus)}: the largest has "
            f"{_said(most.n_cpus, most.n_gpus)}",
            hint="see --cpus-per-worker and --gpus-per-worker",
        )
    idle = [node.name for node, n in found if not n and node.n_cpus]
    notes = []
    if idle:
        notes.append(
            f"{', '.join(idle[:3])}{' and others' if len(idle) > 3 else ''}: fewer than "
            f"{_said(n_cpus or 0.0, n_gpus)}, so no actor there; --cpus-per-worker asks for fewer"
        )
    n_all = min(sum(n for _, n in found), n_lines)
    return Placement(n_all, used, n_cpus or 0.0, n_gpus, tuple(notes))


def _room(node: Node, cpus: float, gpus: float) -> int:
    rooms = [
        int(has // wants) for has, wants in ((node.n_cpus, cpus), (node.n_gpus, gpus)) if wants
    ]
    return min(rooms, default=0)


def _said(cpus: float, gpus: float) -> str:
    said = f"{cpus:g} CPU{'' if cpus == 1 else 's'}"
    return said if not gpus else f"{said} and {gpus:g} GPU{'' if gpus == 1 else 's'}"


__all__ = ["Node", "Placement", "place"]
