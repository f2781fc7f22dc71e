"""Options of the process: conflicts, what is set before loading, and proofs that fail where it is undone."""

import os
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._inductor.config as settings
from torch._inductor.codecache import PyCodeCache

from sdopt.assembly import Assembly
from sdopt.measure.trace import Trace
from sdopt.options.environment import (
    CoordinateDescent,
    CudnnBenchmark,
    ExpandableSegments,
    InductorFreezing,
    MiopenFind,
    TunableOp,
)
from tests.fixtures import Compose, Load

PIPE: Any = None
"""What these options do not look at."""


def traced(*operators: str, benchmark: bool = True) -> Trace:
    trace = Trace()
    trace.denoiser.operators, trace.denoiser.cudnn_benchmark = (
        Counter(operators),
        benchmark,
    )
    return trace


class TestAtTheStart:
    def test_options_start_before_anything_is_loaded(
        self, variant: Compose, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[str | None] = []

        def load(*_args: Any) -> Any:
            seen.append(os.environ.get("MIOPEN_FIND_MODE"))
            raise InterruptedError

        monkeypatch.setenv("MIOPEN_FIND_MODE", "NORMAL")
        monkeypatch.setattr("sdopt.assembly.load_pipeline", load)
        with pytest.raises(InterruptedError):
            Assembly.load(variant("environment=miopen_find"), "cpu")
        assert seen == ["FAST"]

    @pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
    def test_segments_keep_the_users_other_settings(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        told: list[str] = []
        monkeypatch.setenv(name, "max_split_size_mb:128,expandable_segments:False")
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
        ExpandableSegments().begin_process()
        assert (
            told
            == ["max_split_size_mb:128,expandable_segments:True"]
            == [os.environ[name]]
        )

    def test_a_program_that_runs_is_told_how_to_start(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        [found] = ExpandableSegments().broken(PIPE)
        assert found.endswith(
            "start Python with PYTORCH_ALLOC_CONF=expandable_segments:True"
        )


class TestEvidence:
    def test_cudnn_must_benchmark_and_compute(self) -> None:
        option, before = CudnnBenchmark(), torch.backends.cudnn.benchmark
        proof = option.apply(PIPE)
        with option.context(PIPE):
            assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark == before
        assert proof(traced("aten::cudnn_convolution")).engaged
        assert not proof(traced("aten::cudnn_convolution", benchmark=False)).engaged
        assert not proof(traced("aten::mkldnn_convolution")).engaged

    def test_the_trace_has_the_switch_within_the_denoiser(self, session: Load) -> None:
        loaded, seen = session(), []
        for context in (nullcontext(), CudnnBenchmark().context(PIPE)):
            with context:
                proof = CudnnBenchmark().apply(PIPE)
                loaded._assembly.proofs["environment"] = proof
                loaded._variant.choices["environment"] = "cudnn_benchmark"  # type: ignore[index]
                [found] = [
                    each
                    for each in loaded.prove().evidence
                    if each.axis == "environment"
                ]
                assert not found.engaged  # a CPU has no cuDNN
                seen.append(found.summary.partition(" in the denoiser")[0])
        assert seen == ["benchmarking was off", "benchmarking was on"]

    def test_segments_must_grow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        proof = ExpandableSegments().apply(PIPE)
        for segments, engaged in (
            ([], False),
            ([False, False], False),
            ([True, False], True),
        ):
            snapshot = [{"is_expandable": grows} for grows in segments]
            monkeypatch.setattr(torch.cuda, "memory_snapshot", partial(list, snapshot))
            assert proof(Trace()).engaged == engaged

    def test_miopen_must_compute_in_the_mode(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MIOPEN_FIND_MODE", "HYBRID")
        proof = MiopenFind("HYBRID").apply(PIPE)
        assert proof(traced("aten::miopen_convolution")).engaged
        assert not proof(traced("aten::cudnn_convolution")).engaged
        assert (
            not MiopenFind("FAST")
            .apply(PIPE)(traced("aten::miopen_convolution"))
            .engaged
        )

    def test_products_must_be_tuned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state, results = [False], ["a product"]
        monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: state[-1])
        monkeypatch.setattr(torch.cuda.tunable, "enable", state.append)
        monkeypatch.setattr(torch.cuda.tunable, "set_filename", lambda _name: None)
        monkeypatch.setattr(torch.cuda.tunable, "get_results", lambda: tuple(results))
        option = TunableOp()
        proof = option.apply(PIPE)
        with option.context(PIPE):
            pass
        assert state == [False, True, False]
        assert proof(Trace()).engaged
        results.clear()
        assert not proof(Trace()).engaged

    def test_kernels_must_be_tuned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._dynamo.utils import counters

        proof = CoordinateDescent().apply(PIPE)
        monkeypatch.setitem(counters, "inductor", Counter())
        assert not proof(Trace()).engaged
        monkeypatch.setitem(counters, "inductor", Counter(coordesc_tuning_bench=3))
        assert proof(Trace()).engaged

    def test_weights_must_be_constants_of_what_was_compiled_since(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = [ModuleType("before")]
        made[0].__dict__["_frozen_param0"] = None
        monkeypatch.setattr(PyCodeCache, "modules", made)
        option = InductorFreezing()
        proof = option.apply(PIPE)
        assert not settings.freezing
        with option.context(PIPE):
            assert settings.freezing
        assert not proof(Trace()).engaged
        made.append(made[0])
        assert proof(Trace()).engaged

    @pytest.mark.slow
    @pytest.mark.parametrize("undone", [False, True])
    def test_inductor_makes_constants(
        self, session: Load, monkeypatch: pytest.MonkeyPatch, undone: bool
    ) -> None:
        if undone:
            monkeypatch.setattr(
                InductorFreezing, "context", lambda self, pipe: nullcontext()
            )
        torch._dynamo.reset()  # code that another test compiled without constants would be taken
        loaded = session(
            "environment=inductor_freezing", "compiler=inductor", "workload.steps=2"
        )
        loaded.time_once()
        [found] = [
            each
            for each in loaded.prove().evidence
            if each.axis == "environment.inductor_freezing"
        ]
        assert found.engaged != undone, found.summary
