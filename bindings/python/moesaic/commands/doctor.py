"""`moesaic doctor`: what this host has, what this process may use of it, and whether the engine works here."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from moesaic.commands import options
from moesaic.commands.output import Tables, format_bytes, print_json, stdout_for_json

SCHEMA = 1

_MEASURE_SECONDS = 0.3
_MOVED_NS = 40.0
"""How far apart times of a tile from another thread are, in ns, where processors have moved. (Two processors of a Zen 4
guest: 1 on one core, 7 with an L3 in common, 90 without. 16 of an AMX guest, which stay: 33 to 47.)"""

_DESCRIPTION = """\
Shows the CPU, each tier of instruction sets, the topology, the limits of this process, huge pages, versions, and
whether the hook is registered with transformers. A tier is `supported` if the CPU has it, `permitted` if the system
lets this process use it, `compiled` if this build holds its kernels, `chosen` if the engine uses it, `verified` if its
kernel was run now and gave the right numbers. Exits 1 if anything that should work here does not."""


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "doctor", help="what this host has, and whether the engine works here", description=_DESCRIPTION
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the compute ceiling of each tier and the read bandwidth, on one thread and on all, and what it"
        " takes to read what another thread has written (a few seconds, 1 GiB or more)",
    )
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0 if all is well, 1 if a check failed."""
    with stdout_for_json(args.json):
        report = examine(measure=args.measure)
    if args.json:
        print_json(report)
    else:
        show(report)
    return 0 if report["ok"] else 1


def examine(*, measure: bool) -> dict[str, Any]:
    """The whole report, as --json prints it.

    Raises:
        moesaic.UnsupportedHostError: MOESAIC_ISA names what this host lacks.
    """
    import moesaic
    from moesaic import _core
    from moesaic.commands import host

    topology = _core.topology()
    tiers = [tier | {"verified": _verify(tier)} for tier in _core.isa_tiers()]
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "cpu": {"name": _core.cpu_name()},
        "isa": {"chosen": moesaic.isa(), "tiers": tiers},
        "topology": {key: topology[key] for key in ("is_host", "packages", "cores", "pus", "nodes", "l1d", "l2", "l3")},
        "numa": {"nodes": _core.numa(), "threads_bound": _threads_are_bound()},
        "limits": {
            "affinity": topology["affinity"],
            "cpu_quota": topology["cpu_quota"] or None,
            "usable_cores": topology["usable_cores"],
            "threads": moesaic.get_num_threads(),
            "thread_source": _core.get_thread_source(),
            **host.limits(),
        },
        "huge_pages": host.huge_pages(),
        "versions": host.versions(),
        "hook": host.hook(),
        "environment": host.environment(),
    }
    if measure:
        report["ceiling"] = _measure(moesaic.get_num_threads())
    report["problems"] = problems(report)
    report["notes"] = notes(report)
    report["ok"] = not report["problems"]
    return report


def problems(report: dict[str, Any]) -> list[str]:
    """What should work on this host and does not, a line each."""
    found = []
    for tier in report["isa"]["tiers"]:
        if tier["verified"] is False:
            found.append(f"{tier['name']}: the kernel's numbers are wrong")
    if not any(tier["chosen"] for tier in report["isa"]["tiers"]):
        found.append("no instruction set is chosen")
    if report["hook"]["expected"] and not report["hook"]["registered"]:
        found.append(f"the experts implementation is not registered with transformers: {report['hook']['reason']}")
    return found


def notes(report: dict[str, Any]) -> list[str]:
    """What costs speed or memory here but is no fault, a line each."""
    found = []
    for tier in report["isa"]["tiers"]:
        if tier["supported"] and not tier["permitted"]:
            found.append(f"{tier['name']}: the CPU has it, but the system does not let this process use it")
        elif tier["name"] == "onednn" and not tier["compiled"]:
            found.append("onednn: this build was made without oneDNN 3; other tiers are faster here")
        elif tier["supported"] and not tier["compiled"]:
            found.append(f"{tier['name']}: the CPU has it, but this build does not hold its kernels")
    if report["huge_pages"]["transparent"] == "never":
        found.append("transparent huge pages are off; weights are read faster with them: set 'madvise'")
    if len(report["numa"]["nodes"]) > 1 and report["topology"]["is_host"]:
        found += _numa_notes(report["numa"])
    limits = report["limits"]
    if limits["threads"] > limits["usable_cores"]:
        found.append(f"{limits['threads']} threads share {limits['usable_cores']} usable cores")
    elif (handover := report.get("ceiling", {}).get("handover_ns")) and (
        handover["most"] - handover["least"] > _MOVED_NS
    ):
        found.append(
            f"a tile that another thread has packed takes {handover['least']:.0f} to {handover['most']:.0f} ns more, by"
            " the moment: threads move between processors, or a guest's processors between cores, which share a core or"
            " a cache at one moment and not at the next, and all ceilings change with it"
        )
    return found


def _numa_notes(numa: dict[str, Any]) -> list[str]:
    """What keeps weights or threads from staying on their NUMA node, a line each."""
    found = []
    errors = sorted({node["bind_error"] for node in numa["nodes"] if node["bind_error"] is not None})
    if errors:
        found.append(
            f"memory cannot be bound to NUMA nodes (mbind: {', '.join(errors)}); weights lie where threads of the node"
            " touch them first, as long as the system leaves those there"
        )
    for node in numa["nodes"]:
        if node["lies_on"] not in (None, node["os_index"]) and node["bind_error"] is None:
            found.append(
                f"memory meant for NUMA node {node['os_index']} came to lie on node {node['lies_on']}: it has none"
                " left, or this process may not use it"
            )
    if not numa["threads_bound"]:
        found.append(
            "OpenMP's threads are not bound, and may be moved away from the NUMA node whose weights they read: set"
            " OMP_PROC_BIND=spread OMP_PLACES=cores, or MOESAIC_THREAD_SOURCE=own"
        )
    return found


def _threads_are_bound() -> bool:
    from moesaic import _core

    return _core.get_thread_source() == "own" or _core.openmp_threads_are_bound()


def _verify(tier: Any) -> bool | None:
    """Whether the tier's kernel gives the right numbers; None where it cannot run."""
    from moesaic import _core

    if not (tier["supported"] and tier["permitted"] and tier["compiled"]):
        return None
    return _core.verify_isa(tier["name"])


def _measure(threads: int) -> dict[str, Any]:
    """The ceilings on one thread and on all; between them, what it takes to read another thread's tiles."""
    import moesaic
    from moesaic import _core

    counts = [1, threads]
    pool = _core.MachineProbe(threads, 1 << 20) if threads > 1 else None
    fetches: list[float] = []

    def hand_over() -> None:
        if pool is not None:
            fetches.append(pool.fetch(moesaic.isa()))

    compute = []
    for row in _core.compute_probes():
        gflops = []
        for count in counts if row["available"] else ():
            hand_over()
            gflops.append(_core.measure_compute(row["isa"], count, _MEASURE_SECONDS))
        compute.append({"isa": row["isa"], "instruction": row["instruction"], "gflops": gflops or None})
    read = []
    for count in counts:
        probe = _core.ReadProbe(count)
        hand_over()
        read.append({"gbps": probe.measure(_MEASURE_SECONDS), "bytes": probe.bytes, "method": probe.method})
    hand_over()
    handover = None
    if fetches:  # one of them may have been disturbed
        least, *_, most = sorted(fetches)[1:-1]
        handover = {"least": least, "median": statistics.median(fetches), "most": most}
    return {"threads": counts, "compute": compute, "read": read, "handover_ns": handover}


def show(report: dict[str, Any]) -> None:
    """Prints the report for people."""
    tables = Tables()
    topology, limits = report["topology"], report["limits"]
    tables.heading(report["cpu"]["name"])
    tables.table(
        "Instruction sets",
        ["tier", "supported", "permitted", "compiled", "chosen", "verified"],
        [
            [tier["name"], *(_mark(tier[key]) for key in ("supported", "permitted", "compiled", "chosen", "verified"))]
            for tier in report["isa"]["tiers"]
        ],
    )
    caches = ", ".join(
        f"{name} {format_bytes(topology[key]['bytes'])}"
        + (f" for {topology[key]['pus']} units" if topology[key]["pus"] > 1 else "")
        for name, key in (("L1d", "l1d"), ("L2", "l2"), ("L3", "l3"))
        if topology[key]["bytes"]
    )
    nodes = ", ".join(f"{format_bytes(node['memory_bytes'])} with {node['pus']} units" for node in topology["nodes"])
    rows = [
        ["packages, cores, units", f"{topology['packages']}, {topology['cores']}, {topology['pus']}"],
        ["NUMA nodes", f"{len(topology['nodes'])}: {nodes}"],
        ["weights", _placement(report["numa"]["nodes"], is_host=topology["is_host"])],
        ["caches", caches or "unknown"],
    ]
    if not topology["is_host"]:
        rows.append(["source", "MOESAIC_HWLOC_XML, not this host"])
    tables.table("Topology", None, rows)
    tables.table(
        "This process",
        None,
        [
            ["CPUs it may use", f"{len(limits['affinity'])} of {topology['pus']}"],
            ["CPU quota", "none" if limits["cpu_quota"] is None else f"{limits['cpu_quota']:.2f} CPUs"],
            ["threads", f"{limits['threads']}, source {limits['thread_source']}"],
            ["memory available", format_bytes(limits["available_memory_bytes"])],
            ["memory limit (cgroup)", _limit(limits["cgroup_memory_bytes"])],
            ["address space (RLIMIT_AS)", _limit(limits["address_space_bytes"])],
            ["locked memory (RLIMIT_MEMLOCK)", _limit(limits["locked_memory_bytes"])],
            *([name, value] for name, value in report["environment"].items()),
        ],
    )
    pages = report["huge_pages"]
    tables.table(
        "Huge pages",
        None,
        [
            ["transparent", f"{pages['transparent'] or 'not there'} (defrag {pages['defrag'] or 'unknown'})"],
            *(
                [f"reserved, {format_bytes(row['bytes'])}", f"{row['total']}, {row['free']} free"]
                for row in pages["reserved"]
            ),
        ],
    )
    hook = report["hook"]
    tables.table(
        "Software",
        None,
        [
            *([name, version or "not installed"] for name, version in report["versions"].items()),
            ["hook in transformers", "registered" if hook["registered"] else f"not registered: {hook['reason']}"],
        ],
    )
    if "ceiling" in report:
        _show_ceiling(tables, report["ceiling"])
    for note in report["notes"]:
        tables.line(f"note: {note}")
    for problem in report["problems"]:
        tables.line(f"problem: {problem}", style="bold red")
    if report["ok"]:
        tables.line(f"All checks passed; the engine runs on {report['isa']['chosen']}.", style="bold green")


def _show_ceiling(tables: Tables, ceiling: dict[str, Any]) -> None:
    one, all_threads = ceiling["threads"]
    rows = [
        [
            probe["isa"],
            probe["instruction"],
            *([f"{rate:,.1f} GFLOP/s" for rate in probe["gflops"] or []] or ["-", "-"]),
        ]
        for probe in ceiling["compute"]
    ]
    read = ceiling["read"]
    rows.append(["read", read[-1]["method"], *(f"{row['gbps']:.1f} GB/s" for row in read)])
    if (handover := ceiling["handover_ns"]) is not None:
        rows.append(["hand over", "1 KB from another thread", "-", f"{handover['median']:.0f} ns more"])
    threads = f"{all_threads} thread" + ("s" if all_threads != 1 else "")
    tables.table("Ceilings", ["", "with", f"{one} thread", threads], rows)


def _placement(nodes: list[dict[str, Any]], *, is_host: bool) -> str:
    """How a layer's weights are divided."""
    if len(nodes) == 1:
        return "whole, for one NUMA node"
    cores = ", ".join(str(node["cores"]) for node in nodes)
    if not is_host:
        how = "in name only"
    elif any(node["bind_error"] is not None for node in nodes):
        how = "placed by first touch"
    else:
        how = "bound"
    return f"divided among {len(nodes)} nodes with {cores} cores, {how}"


def _mark(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _limit(count: int | None) -> str:
    return "none" if count is None else format_bytes(count)
