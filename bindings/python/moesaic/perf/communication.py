"""Time of collective operations between devices: rings and two-dimensional meshes, one level or nodes of devices.

`n` is always what one device holds before the operation, or after it, whichever is larger, in bytes; p the devices,
alpha the latency of a message and beta the bytes a second that a device sends to one neighbour. The formulas are exact
for messages that do not meet others on a link (Thakur, Rabenseifner, Gropp: Optimization of collective communication
operations in MPICH, 2005; Chan, Heimlich, Purkayastha, van de Geijn: Collective communication, 2007):

    all-gather, reduce-scatter, ring      (p - 1) alpha + (p - 1)/p n/beta
    all-reduce, ring                      twice that
    all-to-all, ring, both directions     floor(p/2) alpha + floor(p^2/4)/2 (n/p)/beta    the busiest link
    the same on a mesh of r x c           one dimension after the other; all-to-all routed along rows first

A ring is full-duplex, so an all-to-all takes the shorter way round. A mesh has no wrap-around links: a ring of messages
is laid along a line and back, which its links carry at full rate because both directions are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesaic.perf.fields import at_least, one_of, whole

__all__ = ["Collective", "Link", "Topology", "collective_ms", "split_mesh"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Link:
    """The connection between two neighbours, each way.

    Attributes:
        bandwidth_gbps: bytes a second of one link, in units of 1e9.
        latency_us: from the send of an empty message to its arrival.
        links: parallel links between two neighbours, over which a message is spread evenly.
        contention: others that use the links meanwhile, as a factor on the bytes: 1 for nobody, 2 for as much again.
    """

    bandwidth_gbps: float
    latency_us: float = 5.0
    links: int = 1
    contention: float = 1.0

    def __post_init__(self) -> None:
        at_least("link.bandwidth_gbps", self.bandwidth_gbps, 0.0, exclusive=True)
        at_least("link.latency_us", self.latency_us, 0.0)
        whole("link.links", self.links, 1)
        at_least("link.contention", self.contention, 1.0)

    def bytes_ms(self, count: float) -> float:
        """Milliseconds for so many bytes over the links, latency not counted."""
        return count * self.contention / (self.bandwidth_gbps * self.links * 1e6)


@dataclass(frozen=True)
class Topology:
    """Devices and what connects them: `nodes` of `devices` each.

    A device is what runs one share of the model: a socket, a NUMA node, a host. Inside a node they form a ring or a
    mesh over `intra`; the nodes form one over `inter`, where every node has one connection that its devices share.
    """

    nodes: int = 1
    devices: int = 1
    kind: Literal["ring", "mesh"] = "ring"
    intra: Link = Link(bandwidth_gbps=48.0, latency_us=2.0)
    inter: Link = Link(bandwidth_gbps=25.0, latency_us=5.0)

    def __post_init__(self) -> None:
        whole("topology.nodes", self.nodes, 1)
        whole("topology.devices", self.devices, 1)
        one_of("topology.kind", self.kind, ("ring", "mesh"))

    @property
    def size(self) -> int:
        """All devices."""
        return self.nodes * self.devices


def split_mesh(devices: int) -> tuple[int, int]:
    """Rows and columns of the most nearly square mesh of so many devices; 1 x p where p is prime."""
    rows = next(r for r in range(int(devices**0.5), 0, -1) if devices % r == 0)
    return rows, devices // rows


def collective_ms(operation: Collective, topology: Topology, count: float) -> float:
    """Milliseconds of one operation over all devices of a topology.

    Args:
        operation: what is done.
        topology: the devices; with one of them every operation takes no time.
        count: bytes n: the vector to be reduced, the gathered result, what one device sends to all (itself included).

    Raises:
        ValueError: an unknown operation, or a negative number of bytes.
    """
    one_of("operation", operation, COLLECTIVES)
    at_least("bytes", count, 0.0)
    inside, between = (topology.kind, topology.intra, topology.devices), (topology.kind, topology.inter, topology.nodes)
    if topology.nodes == 1:
        return _level_ms(operation, *inside, count)
    if topology.devices == 1:
        return _level_ms(operation, *between, count)
    if operation == "all_to_all":
        # First between the nodes, whose connection carries what all of its devices send to other nodes; then inside.
        return _level_ms(operation, *between, count * topology.devices) + _level_ms(operation, *inside, count)
    # Devices with the same place in their nodes work on the same share; all of them cross the node's connection.
    scatter = _level_ms("reduce_scatter", *inside, count)
    if operation == "all_reduce":
        return 2 * scatter + _level_ms("all_reduce", *between, count)
    return scatter + _level_ms(operation, *between, count)


def _level_ms(operation: Collective, kind: str, link: Link, devices: int, count: float) -> float:
    rows, columns = split_mesh(devices) if kind == "mesh" else (1, devices)
    if kind == "ring" or rows == 1:
        mesh_line = kind == "mesh"
        return _line_ms(operation, link, columns, count, line=mesh_line)
    if operation == "all_to_all":
        share = count / devices
        # The busiest cut of a row carries what its left part sends to every column on the right, and the reverse.
        horizontal = (columns // 2) * ((columns + 1) // 2) * rows * share
        vertical = (rows // 2) * ((rows + 1) // 2) * columns * share
        hops = columns - 1 + rows - 1
        return hops * link.latency_us * 1e-3 + link.bytes_ms(horizontal) + link.bytes_ms(vertical)
    # Along the rows with everything, along the columns with what is left of it.
    along_rows = _line_ms("reduce_scatter", link, columns, count, line=True)
    along_columns = _line_ms("reduce_scatter", link, rows, count / columns, line=True)
    return (2 if operation == "all_reduce" else 1) * (along_rows + along_columns)


def _line_ms(operation: Collective, link: Link, devices: int, count: float, *, line: bool) -> float:
    """One dimension: a ring, or a line (a mesh's), whose ring of messages closes over all of its links."""
    if devices == 1:
        return 0.0
    if operation == "all_to_all":
        if line:
            crossing = (devices // 2) * ((devices + 1) // 2)
            return (devices - 1) * link.latency_us * 1e-3 + link.bytes_ms(crossing * count / devices)
        crossing_half = devices * devices // 4 / 2
        return (devices // 2) * link.latency_us * 1e-3 + link.bytes_ms(crossing_half * count / devices)
    passes = 2 if operation == "all_reduce" else 1
    return passes * ((devices - 1) * link.latency_us * 1e-3 + link.bytes_ms((devices - 1) / devices * count))
