"""What the engine does in one call of an experts layer: jobs, stages, tasks, and how long they keep the threads.

Sizes of jobs and tasks are asked of the engine (`cpu_kernels/tile_evaluator.h`). The rest follows the rules of
`moe/jobs.cc` and `moe/pass.cc`: rows of one expert are cut into jobs, a job is a chain of stages, a stage is cut into
parts where there are few jobs, a job is carried on by the worker that has its activations in cache, and jobs begin in
order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from moesaic import _core

__all__ = ["Cut", "Job", "JobCut", "Schedule", "Stage", "cut_jobs", "run_jobs"]

_TILE_COLUMNS = 32
_INTERMEDIATE_UNIT = 128


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The next multiple of b."""
    return ceil_div(a, b) * b


class Job(NamedTuple):
    """Rows of one expert that are computed together; `first`: no other job of this expert comes before."""

    rows: int
    first: bool


def cut_jobs(rows: Sequence[int], hidden: int, intermediate: int, group: int | None = None) -> list[Job]:
    """The jobs of a call, in the order in which they begin: the fullest expert first. ValueError where a number of rows
    is negative.

    Args:
        rows: of each expert.
        hidden: H.
        intermediate: I.
        group: neighbouring experts whose adapters are packed together; the group with the fullest expert begins.
            None: all.
    """
    if rows and min(rows) < 0:
        raise ValueError(f"rows holds {min(rows)}; expected none below 0")
    size = group or max(len(rows), 1)
    groups = [sorted(rows[first : first + size], reverse=True) for first in range(0, len(rows), size)]
    groups.sort(key=lambda counts: -counts[0])
    jobs = []
    for count in itertools.chain.from_iterable(groups):
        if count == 0:
            continue
        chunk = _core.chunk_rows(count, hidden, intermediate)
        jobs += [Job(min(chunk, count - first), first == 0) for first in range(0, count, chunk)]
    return jobs


class Cut(Enum):
    """What the parts of a stage are ranges of."""

    WHOLE = "whole"
    INTERMEDIATE = "intermediate"
    HIDDEN = "hidden"


@dataclass(frozen=True)
class JobCut:
    """Into how many parts each stage of a job is cut: those that begin last are cut finer, and those with many of all
    rows.

    Attributes:
        intermediate, hidden: parts of stages along I, and along H.
        tail_jobs, tail_intermediate, tail_hidden: of so many of the last jobs.
        units, columns: smallest pieces of I, and of H; there are no more parts.
    """

    intermediate: int
    hidden: int
    tail_jobs: int
    tail_intermediate: int
    tail_hidden: int
    units: int = 1
    columns: int = 1

    @staticmethod
    def choose(jobs: int, hidden: int, intermediate: int, threads: int, slots: int) -> JobCut:
        """ChooseBlocking() of the engine. @param slots  jobs whose activations fit the scratch memory at a time."""
        units, columns = ceil_div(intermediate, _INTERMEDIATE_UNIT), ceil_div(hidden, _TILE_COLUMNS)
        units_per_task, columns_per_task, tail_jobs, tail_parts = _core.choose_blocking(
            jobs, hidden, intermediate, threads, slots
        )
        tail_units = ceil_div(units_per_task, tail_parts)
        tail_columns = _core.columns_of_part(columns_per_task, tail_parts)
        return JobCut(
            ceil_div(units, units_per_task),
            ceil_div(columns, columns_per_task),
            tail_jobs,
            ceil_div(units, tail_units),
            ceil_div(columns, tail_columns),
            units,
            columns,
        )

    def parts(self, cut: Cut, *, tail: bool, least: int = 1) -> int:
        """Parts of a stage, of a job whose stages are cut into so many at least where they can be."""
        if cut is Cut.WHOLE:
            return 1
        if cut is Cut.INTERMEDIATE:
            few = ceil_div(self.units, _core.units_of_part(self.units, least))
            return max(self.tail_intermediate if tail else self.intermediate, few)
        few = ceil_div(self.columns, _core.columns_of_part(self.columns, least))
        return max(self.tail_hidden if tail else self.hidden, few)


@dataclass(frozen=True)
class Stage:
    """One stage of a job: the time that it keeps one thread busy, all parts together, in milliseconds."""

    cut: Cut
    thread_ms: float


@dataclass(frozen=True)
class Schedule:
    """When the jobs of a call are done, and how many tasks they were."""

    makespan_ms: float
    busy_ms: float
    tasks: int


class _Link(NamedTuple):
    """A stage in its job's chain: parts, the time of the first of them, and of each other."""

    parts: int
    first_ms: float
    other_ms: float


def run_jobs(
    jobs: Sequence[Sequence[Stage]],
    cut: JobCut,
    threads: int,
    slots: int,
    task_ms: float,
    uneven: Callable[[int], float] = lambda threads: 1.0,
    least_parts: Sequence[int] | None = None,
) -> Schedule:
    """Runs the stages of all jobs on a pool of threads.

    A worker that ends a task goes on with its own job where that has a task that is ready; else it begins the next job,
    of which at most `slots` are under way, else it helps the oldest job that has one. The parts of a stage take equally
    long but for one, for which the stage waits.

    Args:
        jobs: the stages of each job, in the order in which jobs begin.
        cut: parts of the stages.
        threads: workers.
        slots: jobs under way at most.
        task_ms: what a task costs besides its work.
        uneven: of so many equal tasks, the longest over the mean.
        least_parts: of each job's stages, where they can be cut; None: one.
    """
    first_tail = len(jobs) - cut.tail_jobs
    chains: list[list[_Link]] = []
    tasks = 0
    for index, stages in enumerate(jobs):
        chain: list[_Link] = []
        for stage in stages:
            least = 1 if least_parts is None else least_parts[index]
            parts = cut.parts(stage.cut, tail=index >= first_tail, least=least)
            tasks += parts
            each = stage.thread_ms / parts + task_ms
            if parts > 1:
                longest = min(uneven(min(parts, threads)), parts)
                chain.append(_Link(parts, longest * each, (parts - longest) / (parts - 1) * each))
            elif chain and chain[-1].parts == 1:
                chain[-1] = _Link(1, chain[-1].first_ms + each, 0.0)  # the same worker goes on
            else:
                chain.append(_Link(1, each, 0.0))
        chains.append(chain)
    busy = sum(link.first_ms + (link.parts - 1) * link.other_ms for chain in chains for link in chain)
    return Schedule(_makespan(chains, threads, slots), busy, tasks)


def _makespan(chains: Sequence[Sequence[_Link]], threads: int, slots: int) -> float:
    running: list[tuple[float, int, int]] = []  # (end, worker, job)
    idle = list(range(threads))
    left: dict[int, int] = {}  # parts of the job's present stage that have not ended
    stage_of: dict[int, int] = {}
    waiting: dict[int, int] = {}  # parts that have not begun
    next_job, under_way, now = 0, 0, 0.0

    def task_for(own: int) -> int:
        nonlocal next_job, under_way
        if waiting.get(own, 0) > 0:
            return own
        if next_job < len(chains) and under_way < slots:
            job = next_job
            next_job, under_way = next_job + 1, under_way + 1
            stage_of[job] = 0
            left[job] = waiting[job] = chains[job][0].parts
            return job
        return min(waiting, default=-1)

    last_job = [-1] * threads
    while True:
        while idle:
            worker = idle[-1]
            job = task_for(last_job[worker])
            if job < 0:
                break
            idle.pop()
            link = chains[job][stage_of[job]]
            takes = link.first_ms if waiting[job] == link.parts else link.other_ms
            waiting[job] -= 1
            if waiting[job] == 0:
                del waiting[job]
            last_job[worker] = job
            heapq.heappush(running, (now + takes, worker, job))
        if not running:
            return now
        now = running[0][0]
        while running and running[0][0] == now:
            _, worker, job = heapq.heappop(running)
            idle.append(worker)
            left[job] -= 1
            if left[job] > 0:
                continue
            stage_of[job] += 1
            if stage_of[job] == len(chains[job]):
                under_way -= 1
                del left[job], stage_of[job]
            else:
                left[job] = waiting[job] = chains[job][stage_of[job]].parts
