"""Calls of the engine on tensors of any device: GPU tensors are copied to pinned memory and results back from it.

Copies are enqueued on the stream that is current on the tensor's device, for the calling thread, as every operation of
PyTorch is: behind what makes a tensor, and ahead of what will use or overwrite it.

- To the host: all tensors of a call are enqueued, then the caller sleeps until the last one has arrived.
- To the device: nobody waits. The engine writes its results to pinned memory, and the copy is ordered before whatever
  the caller enqueues next. What goes to another device than the output is waited for, because nobody orders that.

Pinned memory comes from PyTorch's caching allocator, which gives a block out again only when the copies that were
enqueued from or to it have ended. So nothing here is kept between calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moesaic import _core
from moesaic.lora import Layout

__all__ = [
    "DEVICE_TO_HOST",
    "HOST_TO_DEVICE",
    "backward",
    "check_tensors",
    "collect_times",
    "forward",
    "on_cpu",
]

#: The rows of a profile that count copies.
DEVICE_TO_HOST, HOST_TO_DEVICE = "device_to_host", "host_to_device"

_Devices = tuple[torch.device, ...]


def on_cpu(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` in CPU memory, itself where it is there already; waits for the copy.

    Raises:
        TypeError: it is no tensor.
        ValueError: it has no data (meta).
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.is_cpu:
        return tensor
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device; expected a tensor with data")
    return tensor.to("cpu")


def check_tensors(hidden: object, top_k_ids: object, top_k_weights: object) -> None:
    """Raises TypeError unless all of them are tensors."""
    tensor = torch.Tensor
    if isinstance(hidden, tensor) and isinstance(top_k_ids, tensor) and isinstance(top_k_weights, tensor):
        return
    for name, value in (("hidden", hidden), ("top_k_ids", top_k_ids), ("top_k_weights", top_k_weights)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; expected a torch.Tensor")


def forward(
    core: _core.Layer,
    hidden: torch.Tensor,
    top_k_ids: torch.Tensor,
    top_k_weights: torch.Tensor,
    lora_tensors: tuple[torch.Tensor, ...],
    lora_layout: Layout,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, _Devices | None]:
    """A forward of `core` for tensors on any devices.

    Returns:
        The output on the device of `hidden`, the state, and `hidden` and `top_k_weights` in CPU memory, to save them:
        so backward copies neither again, and keeps no GPU memory alive. At last the devices of `hidden`,
        `top_k_weights` and the LoRA tensors, for `backward`.

    Raises: as `moesaic.moe_experts`.
    """
    inputs = (hidden, top_k_ids, top_k_weights)
    if _all_on_cpu(inputs) and _all_on_cpu(lora_tensors):
        out, state, call = core.prepare_forward(hidden, top_k_ids, top_k_weights, lora_tensors, lora_layout, save)
        call.run()
        return out, state, hidden, top_k_weights, None
    names = ("hidden", "top_k_ids", "top_k_weights")
    host_hidden, host_ids, host_weights, *host_lora = _to_host((*inputs, *lora_tensors), names)
    _core.mark_entry()  # the copies have rows of their own
    into = None
    if hidden.is_cuda:
        into = _queue(hidden.device).host_like(torch.empty(hidden.shape, dtype=hidden.dtype, device="meta"))
    out, state, call = core.prepare_forward(
        host_hidden, host_ids, host_weights, tuple(host_lora), lora_layout, save, into
    )
    call.run()
    _core.mark_exit()
    (result,) = _to_devices((out,), (hidden.device,))
    assert result is not None
    devices = tuple(tensor.device for tensor in (hidden, top_k_weights, *lora_tensors))
    anywhere_else = any(device.type != "cpu" for device in devices)  # it may have been the ids alone
    return result, state, host_hidden, host_weights, devices if anywhere_else else None


def backward(
    core: _core.Layer,
    saved_tensors: tuple[torch.Tensor, ...],
    lora_layout: Layout,
    d_out: torch.Tensor,
    needs: tuple[bool, ...],
    devices: _Devices | None,
) -> tuple[torch.Tensor | None, ...]:
    """``core.backward`` for tensors on any devices.

    Args:
        devices: where the gradients go: those of hidden, of top_k_weights and of each LoRA tensor; None: all in CPU
            memory. (A hook for saved tensors may have left the tensors themselves anywhere.)

    Raises: as `moesaic.ExpertsLayer.backward`.
    """
    if devices is None:
        if d_out.is_cpu and _all_on_cpu(saved_tensors):
            return core.backward(saved_tensors, lora_layout, d_out, needs)
        devices = (torch.device("cpu"),) * (len(saved_tensors) - 1)
    host_d_out, *host_saved = _to_host((d_out, *saved_tensors), ("d_out", "saved.state", "hidden", "top_k_weights"))
    _core.mark_entry()
    first = len(needs) - len(devices)
    memory = tuple(
        _queue(device).host_like(like) if need and device.type == "cuda" else need
        for need, device, like in zip(needs[first:], devices, host_saved[1:], strict=True)
    )
    grads = core.backward(tuple(host_saved), lora_layout, host_d_out, memory)
    _core.mark_exit()
    return (None,) * first + tuple(_to_devices(grads, devices))


def _all_on_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    for tensor in tensors:  # noqa: SIM110  all() over a generator takes twice as long, in every call
        if not tensor.is_cpu:
            return False
    return True


class CudaQueue:
    """The stream that is current on a GPU for the calling thread.

    Raises:
        RuntimeError: the stream is recorded into a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("the moesaic engine computes on the CPU and cannot be captured into a CUDA graph")

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory for a tensor of this shape and dtype, and of its strides where these are dense."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def device_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same on the device."""
        return torch.empty_like(tensor, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues a copy; one of both is pinned memory."""
        target.copy_(source, non_blocking=True)

    def mark(self, timed: bool) -> Any:
        """An event behind everything enqueued so far: ``synchronize()``, ``query()``, ``elapsed_time()``. The wait
        sleeps: a core that spins would be missing elsewhere."""
        event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


#: How a queue is made for a device; tests have one that needs no GPU.
_queue = CudaQueue


class _Copies:
    """Copies in one direction, to or from one device."""

    def __init__(self, queue: CudaQueue, row: str) -> None:
        self.queue = queue
        self._row = row
        self._bytes = 0
        self._timed = _core.timers_enabled()
        self._first = self.queue.mark(True) if self._timed else None
        self._enqueued_ns = _core.clock_ns() if self._timed else 0

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.queue.copy(target, source)
        self._bytes += source.nbytes

    def wait(self) -> None:
        """Returns when all of them have ended."""
        last = self.queue.mark(self._timed)
        last.synchronize()
        if self._first is not None:
            ns = int(self._first.elapsed_time(last) * 1e6)
            _core.add_timed(self._row, "transfer", _core.clock_ns() - ns, ns, self._bytes)

    def leave(self) -> None:
        """Does not wait; their time is counted later."""
        if self._first is not None:
            timed = _Timed(self._row, self._first, self.queue.mark(True), self._enqueued_ns, self._bytes)
            with _timed_lock:
                _timed_copies.append(timed)
            collect_times(wait=False)


def _to_host(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
    """Copies in CPU memory, complete, and what is there already as it is. Tensors past `names` are LoRA's."""
    result = list(tensors)
    copies: dict[torch.device, _Copies] = {}
    for n, tensor in enumerate(tensors):
        name = names[n] if n < len(names) else "a tensor of lora"
        if not tensor.is_cuda:
            result[n] = on_cpu(tensor, name).detach()
            continue
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} has layout {tensor.layout}; expected a dense tensor")
        if tensor.device not in copies:
            copies[tensor.device] = _Copies(_queue(tensor.device), DEVICE_TO_HOST)
        here = copies[tensor.device]
        result[n] = here.queue.host_like(tensor)
        here.add(result[n], tensor.detach())
    for here in copies.values():
        here.wait()
    return result


def _to_devices(results: Sequence[torch.Tensor | None], devices: Sequence[torch.device]) -> list[torch.Tensor | None]:
    """Each result on its device. Those for the first device, the output's, are complete for what is enqueued next on
    its current stream; all others are complete."""
    moved = list(results)
    queues: dict[torch.device, CudaQueue] = {}
    for n, (result, device) in enumerate(zip(results, devices, strict=True)):
        if result is None or device.type == "cpu":
            continue
        if device.type != "cuda":
            moved[n] = result.to(device)
            continue
        if device not in queues:
            queues[device] = _queue(device)
        moved[n] = queues[device].device_like(result)
    # Only now, so that nothing but copies lies between the first and the last one.
    copies = {device: _Copies(queue, HOST_TO_DEVICE) for device, queue in queues.items()}
    for target, result, device in zip(moved, results, devices, strict=True):
        if device in copies and target is not None and result is not None:
            copies[device].add(target, result)
    for device, there in copies.items():
        if device == devices[0]:
            there.leave()
        else:
            there.wait()
    return moved


class _Timed(NamedTuple):
    """Copies that nobody waited for: events before and behind them."""

    row: str
    first: Any
    last: Any
    enqueued_ns: int
    bytes: int


_timed_copies: deque[_Timed] = deque()
_timed_lock = threading.Lock()


def collect_times(wait: bool = True) -> None:
    """Counts copies to a device that were enqueued while timers were on.

    Args:
        wait: for all of them; else only those that have ended are counted.
    """
    with _timed_lock:
        while _timed_copies and (wait or _timed_copies[0].last.query()):
            row, first, last, enqueued_ns, size = _timed_copies.popleft()
            last.synchronize()
            _core.add_timed(row, "transfer", enqueued_ns, int(first.elapsed_time(last) * 1e6), size)
