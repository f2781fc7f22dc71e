"""What a profile of a GPU shows of the denoiser: replayed graphs, kernels, and how long the device worked."""

import json
from pathlib import Path
from typing import Any

import pytest

from sdopt.measure.trace import Trace, _sort
from sdopt.options.attention import backend_of

EVENTS = json.loads((Path(__file__).parent / "gpu_trace.json").read_text())
"""In the form of Kineto's Chrome traces: a text encoder and two calls of a denoiser that replay graphs, and a decoder.

No operator launches these graphs: Kineto gives them CUDA's number of the launch as that of an operator, and one of them
so has that of an operator of the decoder.
"""


def trace_of(events: list[dict[str, Any]]) -> Trace:
    trace = Trace()
    trace.denoiser.calls = 2
    _sort(events, trace)
    return trace


def test_replayed_graphs_of_the_denoiser_are_counted() -> None:
    assert trace_of(EVENTS).graph_launches == 2
    assert (
        trace_of(
            [event for event in EVENTS if "Graph" not in event["name"]]
        ).graph_launches
        == 0
    )


def test_captures_are_counted_where_they_happen() -> None:
    capture = {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaStreamBeginCapture",
        "ts": 1510.0,
        "dur": 1.0,
    }
    found = trace_of(
        [*EVENTS, capture | {"args": {"External id": 21, "correlation": 99}}]
    )
    assert found.denoiser.graph_captures == 1
    assert found.complete
    assert trace_of(EVENTS).denoiser.graph_captures == 0


def test_kernels_and_fused_attention_are_those_of_the_denoiser() -> None:
    found = trace_of(EVENTS).kernels
    assert sum(found.values()) == 3
    assert not [name for name in found if "xmma" in name or "flash_fwd" in name]
    [name] = trace_of(EVENTS).fused_attention
    assert backend_of(name) == "cudnn"


def test_work_that_overlaps_counts_once_and_a_cpu_has_no_such_time() -> None:
    """20 µs of copying, 100 of two kernels that overlap by 30, and 80 in the second call."""
    assert trace_of(EVENTS).denoiser_busy_s == pytest.approx((20 + 100 + 80) / 2 * 1e-6)
    of_cpu = [
        event for event in EVENTS if event["cat"] in ("user_annotation", "cpu_op")
    ]
    assert trace_of(of_cpu).denoiser_busy_s is None


def test_what_a_profile_has_lost_is_no_time_without_work() -> None:
    """CUPTI loses kernels: the device would seem idle, and two variants to run other kernels."""
    whole = trace_of(EVENTS)
    lost = trace_of(
        [
            event
            for event in EVENTS
            if event["cat"] != "kernel" or event["args"]["correlation"] != 3
        ]
    )
    assert whole.complete
    assert not lost.complete
    assert lost.denoiser_busy_s is None
    assert any(name.startswith("kernel ") for name in whole.counts())
    assert not any(name.startswith("kernel ") for name in lost.counts())
