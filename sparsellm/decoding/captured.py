"""A function that queues the same kernels at every call, as a CUDA graph."""

import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")
# Streams that no `Captured` uses now. cuBLAS keeps a workspace (32 MiB on an H100) for every stream
# that it has ever seen, so a new stream at each call of ``generate`` would cost memory for good.
_IDLE_STREAMS: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class Captured(Generic[Result]):
    """Calls a function once as it is, which compiles and measures kernels, and then as a graph.

    Its tensors must stay where they are. On a CPU, and where the capture fails, it is called as it
    is every time; the latter is said once. The function is an argument of each call, and not kept:
    if it is a method of the owner, the two would hold each other, and Python would free the GPU's
    memory only at some later time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None
        self._may_capture = device.type == "cuda"
        self._num_calls = 0

    @property
    def is_graph(self) -> bool:
        """Whether a graph has been captured."""
        return self._graph is not None

    def __call__(self, function: Callable[[], Result]) -> Result:
        """The function's result; of a graph it is in the same memory every time."""
        self._num_calls += 1
        if self._num_calls == 1 and self._may_capture:
            return self._warm_up(function)
        if self._num_calls == 2 and self._may_capture:
            self._capture(function)
        if self._graph is None or self._result is None:
            return function()
        self._graph.replay()
        return self._result

    def _warm_up(self, function: Callable[[], Result]) -> Result:
        """The first call, on the capture's stream: cuBLAS makes a workspace for each stream."""
        present = torch.cuda.current_stream(self._device)
        self._stream = _idle_stream(self._device)
        weakref.finalize(self, _IDLE_STREAMS[self._device].append, self._stream)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            result = function()
        present.wait_stream(self._stream)
        return result

    def _capture(self, function: Callable[[], Result]) -> None:
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        # What the first call has observed of its neurons decides which kernels are captured.
        torch.cuda.synchronize(self._device)
        # Not `torch.cuda.graph`, which also gives all cached memory back to the driver.
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._result = function()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            _say_once(str(error).splitlines()[0])
            return
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._graph = graph


def _idle_stream(device: torch.device) -> torch.cuda.Stream:
    try:
        return _IDLE_STREAMS[device].pop()
    except IndexError:
        return torch.cuda.Stream(device)


@functools.cache
def _say_once(reason: str) -> None:
    warnings.warn(f"generation runs without a CUDA graph, more slowly: {reason}", stacklevel=4)
