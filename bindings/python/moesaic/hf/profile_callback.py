"""Where the time of a training run goes, logged beside the loss."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import moesaic
from moesaic import _core
from moesaic.profiler import Profile
from moesaic.profiles import document as doc
from moesaic.profiles.shares import ATTENTION, PARTS, attention_modules, step_parts

__all__ = ["ProfileCallback"]


class ProfileCallback(TrainerCallback):  # type: ignore[misc]
    """Logs phase times, their fraction of what the host can do, and what each part of a step takes::

        trainer.add_callback(moesaic.hf.ProfileCallback(trainer))

    Whenever the Trainer logs a loss, these metrics follow, means over the steps since the last time:

    ``moesaic/step_ms``
        wall clock of a step with the loading of its data; logging, saving and evaluation are left out.
    ``moesaic/experts_ms``, ``moesaic/experts_share``
        time in the engine, and its part of the step.
    ``moesaic/fraction_of_limit``
        the least time that the experts' work takes on this host / the time that they took.
    ``moesaic/phase_ms/NAME``, ``moesaic/phase_limit/NAME``
        thread time of a phase / threads; its fraction of the ceiling, where its work is counted.
    ``moesaic/share/experts``, ``attention``, ``optimizer``, ``data_loading``, ``other``
        parts of one step, which add up to 1, as torch.profiler saw it: of the second and every `sample_every`th.
        Recording costs PyTorch's operations some microseconds each, so that such a step is longer than others and the
        experts' part of it smaller than `experts_share`, which no recording disturbs.
        It also takes memory: 0.9 GB at the peak of a run of examples/finetune, which therefore goes without.

    The steps are ranges as well, in timers and NVTX: ``full_train_loop``, ``forward_only``, ``backward_only``.

    Args:
        trainer: metrics go through its ``log``: to its history and to everything in ``report_to``. Without it they only
            join what the Trainer logs, which integrations have passed on by then.
        sample_every: steps between two that torch.profiler records; 0: none.
    """

    def __init__(self, trainer: Trainer | None = None, sample_every: int = 50) -> None:
        if sample_every < 0:
            raise ValueError(f"sample_every is {sample_every}; expected 0 or more")
        self._trainer = trainer
        self._sample_every = sample_every
        self._profile: Profile | None = None
        self._logging = False
        self._hooks: list[Any] = []
        self._ranges: dict[str, _core.OuterRange] = {}
        self._thread = 0
        self._steps = 0
        self._wall_ms = 0.0
        self._step_from = 0.0
        self._before: dict[str, dict[str, float]] = {}
        self._sample: torch.profiler.profile | None = None
        self._sample_hooks: list[Any] = []
        self._model: nn.Module | None = None
        self.parts: dict[str, float] | None = None
        """Milliseconds of each part of the last step that torch.profiler recorded."""
        self._parts_are_new = False

    # The Trainer's events, in the order of a run.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self._end()  # a run that ended with an exception
        self._model = kwargs["model"]
        self._thread = threading.get_ident()
        self._profile = moesaic.profile()
        self._profile.measure_ceilings()
        self._profile.__enter__()
        self._open("full_train_loop")
        self._hooks = [
            self._model.register_forward_pre_hook(lambda *_: self._open("forward_only")),
            self._model.register_forward_hook(self._forward_ended),
        ]
        self._steps, self._wall_ms, self._before = 0, 0.0, self._totals()
        self._step_from = time.perf_counter()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A backward of several that make one step has ended."""
        self._close("backward_only")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last backward of a step has ended."""
        self._close("backward_only")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step has ended, the optimizer's included."""
        if self._profile is None:
            return
        self._close("backward_only")
        wall_ms = (time.perf_counter() - self._step_from) * 1e3
        self._steps += 1
        self._wall_ms += wall_ms
        self._end_sample(wall_ms)
        following = state.global_step + 1
        if self._sample_every and (following == 2 or following % self._sample_every == 0):
            self._begin_sample()
        self._step_from = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds the metrics to those of the steps since the last time."""
        if self._profile is None or self._logging or not logs or "loss" not in logs or self._steps == 0:
            return
        metrics = self._metrics()
        if self._trainer is None:
            logs.update(metrics)
            state.log_history[-1].update(metrics)
        else:
            self._logging = True
            try:
                # The base class's: what trainers add to their own records (TRL averages its metrics and empties them)
                # is no part of this one.
                Trainer.log(self._trainer, metrics)
            finally:
                self._logging = False
        self._step_from = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saving is no part of a step."""
        self._step_from = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nor is evaluation."""
        self._step_from = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends measuring."""
        self._end()

    # Ranges around forward and backward.

    def _open(self, name: str) -> None:
        if threading.get_ident() == self._thread and name not in self._ranges:
            self._ranges[name] = _core.OuterRange(name)

    def _close(self, name: str) -> None:
        if name in self._ranges:
            self._ranges.pop(name).close()

    def _forward_ended(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._close("forward_only")
        loss = output.get("loss") if hasattr(output, "get") else None
        first = loss if loss is not None else next((t for t in _tensors(output) if t.requires_grad), None)
        if first is not None and first.requires_grad:  # its gradient is the first that backward computes
            first.register_hook(lambda gradient: self._open("backward_only"))

    # One step under torch.profiler.

    def _begin_sample(self) -> None:
        assert self._model is not None
        if torch._C._autograd._profiler_enabled():  # the user's own
            return

        def enter(module: nn.Module, *_: Any) -> None:
            opened = torch.profiler.record_function(ATTENTION)
            opened.__enter__()  # type: ignore[no-untyped-call]
            stack.append(opened)

        def leave(*_: Any) -> None:
            if stack:
                stack.pop().__exit__(None, None, None)

        stack: list[Any] = []
        for module in attention_modules(self._model):
            self._sample_hooks.append(module.register_forward_pre_hook(enter))
            # Checkpointing leaves a repeated forward by an exception.
            self._sample_hooks.append(module.register_forward_hook(leave, always_call=True))
        self._sample = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._sample.start()

    def _end_sample(self, wall_ms: float) -> None:
        if self._sample is None:
            return
        sample, self._sample = self._sample, None
        sample.stop()
        self._remove(self._sample_hooks)
        self.parts = step_parts(sample.events(), wall_ms)  # type: ignore[no-untyped-call]
        self._parts_are_new = True

    # Metrics.

    def _totals(self) -> dict[str, dict[str, float]]:
        assert self._profile is not None
        return {
            doc.key_of(row): {"thread_ms": row["thread_ms"], "flops": row["flops"], "bytes": row["bytes"]}
            for row in self._profile.phases()
        }

    def _metrics(self) -> dict[str, float]:
        assert self._profile is not None
        now, before, steps = self._totals(), self._before, self._steps
        ceiling, threads = self._profile.ceiling, _core.get_num_threads()
        nothing = {"thread_ms": 0.0, "flops": 0.0, "bytes": 0.0}
        rows = {name: {k: row[k] - before.get(name, nothing)[k] for k in row} for name, row in now.items()}
        experts_ms = sum(rows.get(name, nothing)["thread_ms"] for name in ("forward", "backward"))
        metrics = {
            "moesaic/step_ms": self._wall_ms / steps,
            "moesaic/experts_ms": experts_ms / steps,
            "moesaic/experts_share": experts_ms / self._wall_ms,
        }
        leaves = {name: row for name, row in rows.items() if doc.is_leaf(name) and row["thread_ms"] > 0}
        if ceiling is not None and experts_ms > 0:
            flops, size = (sum(row[k] for row in leaves.values()) for k in ("flops", "bytes"))
            limit_ms = max(flops / ceiling["compute_gflops"], size / ceiling["read_gbps"]) / 1e6
            metrics["moesaic/fraction_of_limit"] = limit_ms / experts_ms
        for name, row in leaves.items():
            metrics[f"moesaic/phase_ms/{name}"] = row["thread_ms"] / threads / steps
            fraction = doc.rates({**row, "name": name}, threads, ceiling)["fraction_of_ceiling"]
            if fraction is not None:
                metrics[f"moesaic/phase_limit/{name}"] = fraction
        if self._parts_are_new and self.parts is not None:
            whole = sum(self.parts.values())
            metrics.update({f"moesaic/share/{part}": self.parts[part] / whole for part in PARTS})
            self._parts_are_new = False
        self._before, self._steps, self._wall_ms = now, 0, 0.0
        return metrics

    def _end(self) -> None:
        if self._sample is not None:  # a step that never ended
            sample, self._sample = self._sample, None
            sample.stop()
        self._remove(self._sample_hooks)
        self._remove(self._hooks)
        for name in reversed(list(self._ranges)):
            self._close(name)
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.__exit__(None, None, None)
        self._model = None

    @staticmethod
    def _remove(hooks: list[Any]) -> None:
        for hook in hooks:
            hook.remove()
        hooks.clear()


def _tensors(output: Any) -> list[torch.Tensor]:
    values = list(output.values()) if isinstance(output, dict) else output
    values = values if isinstance(values, (list, tuple)) else [values]
    return [value for value in values if isinstance(value, torch.Tensor)]
