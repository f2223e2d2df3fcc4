"""Kineto events of decode steps that are known to the microsecond."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
LAYER = (
    ("flash::FlashAttnFwdSm90", 10.0),
    ("nvjet_tst_gemm", 30.0),
    ("rms_norm_kernel", 2.0),
)
TARGET = LAYER * 4
"""168 microseconds in 12 kernels."""
DRAFT = (("nvjet_tst_gemm", 6.0),) * 8 + (("_markov_greedy_partial_kernel", 2.0),)
"""50 microseconds in 9 kernels."""


class Steps:
    """Builds a trace of equal steps, one call after the other, all on one stream."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 1000.0
        self._correlation = 0

    def graph(self, kernels: Any, *, gap: float = 1.0, call_ends_before: float = 3.0) -> None:
        """A captured graph whose launch call ends some time before its first kernel."""
        number = self._call("cudaGraphLaunch", call_ends_before)
        for place, (name, micros) in enumerate(kernels):
            self.now += gap if place else 0.0
            self._kernel(name, micros, number)

    def eager(self, name: str, micros: float, *, call_ends_before: float = 3.0) -> None:
        """A kernel launched on its own."""
        self._kernel(name, micros, self._call("cudaLaunchKernel", call_ends_before))

    def idle(self, micros: float) -> None:
        """Nothing runs."""
        self.now += micros

    def wait(self) -> None:
        """The host waits for the GPU."""
        self.events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventSynchronize", "ts": self.now}
        )

    def _call(self, name: str, ends_before: float) -> int:
        self._correlation += 1
        self.events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": name,
                "ts": self.now - ends_before - 1.0,
                "dur": 1.0,
                "args": {"correlation": self._correlation},
            }
        )
        return self._correlation

    def _kernel(self, name: str, micros: float, correlation: int) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "ts": self.now,
                "dur": micros,
                "args": {"correlation": correlation, "stream": 7},
            }
        )
        self.now += micros


def dspark_steps(number: int = 12) -> list[Event]:
    """Steps of a target, an eager accept, and a draft: 300 microseconds each.

    Target 168 + 11 of gaps, host 20 and latency 3 before the accept, accept 5, 12 + 3 before the
    draft, draft 50 + 8 of gaps, 17 + 3 before the next target.
    """
    steps = Steps()
    for _ in range(number):
        steps.graph(TARGET)
        steps.idle(23.0)
        steps.eager("_finalize_accept_lens_kernel", 5.0)
        steps.idle(15.0)
        steps.wait()
        steps.graph(DRAFT)
        steps.idle(20.0)
    return steps.events
