"""The options of the group `compiler`: what they conflict with, what they prove, and how near they come to eager."""

import copy
import inspect
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler
from torch._dynamo.utils import counters

from sdopt.errors import UnavailableError
from sdopt.measure import compilation
from sdopt.measure.trace import Trace
from sdopt.options.attention import Sdpa, Vanilla
from sdopt.options.compiler import CudaGraphs, Inductor, Regional, aot
from sdopt.options.compiler.engines import Capture, _traced
from sdopt.options.compiler.graphs import (
    PerShape,
    StandIn,
    TensorRtEngine,
    Tensors,
)
from sdopt.options.compiler.stepping import Steps
from sdopt.options.layout import Layout
from tests.fixtures import CPU, Compose, Load
from tests.options.hosts import TWO_STEPS, StubGraphs, latents


class TestStandIn:
    @pytest.mark.parametrize("reads", [True, False])
    def test_of_what_reads_its_mask_are_for_one_mask(self, reads: bool) -> None:
        """As Lumina 2's transformer, which parts its tokens by the lengths of texts."""

        class Masked(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(3, 2)

            def forward(self, words: torch.Tensor, mask: torch.Tensor) -> Any:
                if reads:
                    [length] = mask.sum(1).tolist()
                    return self.layer(words[:, :length]).sum(1)
                return (self.layer(words) * mask[..., None]).sum(1)

        layer, words = Masked(), torch.randn(1, 4, 3)
        traced = PerShape(layer, _traced)
        masks = [torch.tensor([row]) for row in ([1, 1, 0, 0], [1, 1, 1, 0])]
        for mask in (*masks, *masks):
            assert torch.allclose(traced(words, mask), layer(words, mask))
        assert len(traced.graphs) == (2 if reads else 1)

    def test_of_an_engine_takes_latents_that_are_named_or_in_a_list(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As pipelines of transformers give them."""
        package = SimpleNamespace(MutableTorchTensorRTModule=lambda module, **_: module)
        monkeypatch.setitem(sys.modules, "torch_tensorrt", package)

        class Summed(torch.nn.Module):
            def forward(self, *lists: Any, hidden_states: Any = ()) -> Any:
                return sum(
                    each.sum() for part in (*lists, hidden_states) for each in part
                )

        engine = TensorRtEngine(Summed())
        for count in (2, 3, 2):
            assert engine([torch.ones(count)]) == count
            assert engine(hidden_states=torch.ones(count)) == count
        assert len(engine._shapes) == 2

    def test_makes_one_graph_for_each_shape_and_another_where_weights_have_moved(
        self,
    ) -> None:
        compilation.reset()
        layer = torch.nn.Linear(3, 2)
        stand_in = PerShape(layer, lambda call: call)
        for rows in (1, 2, 1, 2):
            assert stand_in(torch.ones(rows, 3)).shape == (rows, 2)
        assert len(stand_in.graphs) == compilation.compiled_so_far()[1] == 2
        layer.weight.data = layer.weight.data.clone()
        stand_in(torch.ones(1, 3))
        assert len(stand_in.graphs) == 3
        compilation.reset()


BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


class TestSteps:
    """The scheduler's step, as the table of `whole_step` has it."""

    @pytest.mark.parametrize("kind", [DDIMScheduler, EulerDiscreteScheduler])
    @pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
    def test_is_that_of_the_scheduler(self, kind: Any, prediction: str) -> None:
        extra = (
            {"clip_sample": False, "set_alpha_to_one": False}
            if kind is DDIMScheduler
            else {}
        )
        own, taken = (
            kind(**BETAS, prediction_type=prediction, **extra) for _ in range(2)
        )
        steps = Steps(taken)
        own.set_timesteps(7)
        taken.set_timesteps(7)
        latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        for timestep in own.timesteps:
            predicted = torch.randn(
                latents.shape, generator=torch.Generator().manual_seed(int(timestep))
            )
            scale, keep, add = torch.where(
                steps.table[0] == timestep, steps.table[1:], 0
            ).sum(dim=1)
            assert torch.allclose(
                own.scale_model_input(latents, timestep), scale * latents, atol=1e-5
            )
            following = own.step(predicted, timestep, latents).prev_sample
            assert torch.allclose(
                following, keep * latents + add * predicted, atol=1e-4
            )
            latents = following

    def test_counts_steps_as_the_scheduler_does(self) -> None:
        scheduler = EulerDiscreteScheduler(**BETAS)
        Steps(scheduler)
        scheduler.set_timesteps(3)
        for number, timestep in enumerate(scheduler.timesteps):
            scheduler.step(
                SimpleNamespace(latents=torch.zeros(1)), timestep, torch.zeros(1)
            )
            assert scheduler.step_index == number + 1

    def test_refuse_noise_that_a_caller_asks_for(self) -> None:
        """A pipeline passes `eta` to a step that takes it; once it was dropped without a word."""
        scheduler = DDIMScheduler(**BETAS, clip_sample=False)
        Steps(scheduler)
        assert "eta" in inspect.signature(scheduler.step).parameters
        scheduler.set_timesteps(3)
        given = (
            SimpleNamespace(latents=torch.zeros(1)),
            scheduler.timesteps[0],
            torch.zeros(1),
        )
        scheduler.step(*given, eta=0.0, return_dict=False)
        with pytest.raises(
            ValueError, match=r"eta=0.5: compiler=whole_step adds no noise"
        ):
            scheduler.step(*given, eta=0.5, return_dict=False)

    @pytest.mark.parametrize(
        "scheduler",
        [
            DPMSolverMultistepScheduler(**BETAS),
            DDIMScheduler(**BETAS, clip_sample=True),
        ],
        ids=["earlier predictions", "clipping"],
    )
    def test_of_another_kind_are_an_error(self, scheduler: Any) -> None:
        scheduler = copy.deepcopy(scheduler)
        Steps(scheduler)
        with pytest.raises(
            ValueError, match="is not a weighted sum of latents and prediction"
        ):
            scheduler.set_timesteps(5)


class TestCudaGraphs:
    """The wiring, with a stand-in for `torch.cuda`; what a card does is not seen here."""

    @pytest.fixture
    def stubs(self, monkeypatch: pytest.MonkeyPatch) -> StubGraphs:
        return StubGraphs(monkeypatch)

    def test_draw_the_same_from_a_pool_for_each_module_and_on_one_stream(
        self, session: Load, stubs: StubGraphs, tmp_path: Path
    ) -> None:
        """A library keeps a workspace for each stream: one for each warm-up would count for the option's memory."""
        captured = session("compiler=cuda_graphs", TWO_STEPS)
        assert torch.equal(
            latents(captured, tmp_path / "a"),
            latents(session(TWO_STEPS), tmp_path / "b"),
        )
        # Both prompts in one shape, two steps, one image.
        assert stubs.replayed == 2 + 2 + 1
        assert len(stubs.streams) == 2 * 3
        assert len({id(stream) for stream in stubs.streams}) == 1
        given = captured._inputs[0]
        captured._call(
            prompt=["a", "b"],
            latents=given["latents"].repeat(2, 1, 1, 1),
            generator=2 * given["generator"],
        )
        assert len(stubs.captured) == 2 * 3
        assert len({id(pool) for pool in stubs.captured}) == 3

    def test_a_replay_reads_new_inputs_and_hands_out_copies(
        self, stubs: StubGraphs
    ) -> None:
        stand_in = PerShape(torch.nn.Linear(3, 2), Capture())
        first = stand_in(torch.ones(1, 3))
        second = stand_in(torch.zeros(1, 3))
        assert not torch.equal(first, second)
        assert torch.equal(first, stand_in._orig_mod(torch.ones(1, 3)))

    def test_both_kinds_of_steps_are_replayed(
        self, session: Load, stubs: StubGraphs, tmp_path: Path
    ) -> None:
        """What a whole step keeps is no tensor of its graph, which the next whole step overwrites."""
        chosen = ["caching=deepcache", "workload.steps=7"]
        captured, eager = (
            session(*chosen, "compiler=cuda_graphs", "compiler.targets=[denoiser]"),
            session(*chosen),
        )
        assert torch.equal(
            latents(captured, tmp_path / "a"), latents(eager, tmp_path / "b")
        )
        assert stubs.replayed == 7
        assert len(stubs.captured) == len({id(pool) for pool in stubs.captured}) == 2

    def test_attention_in_products_runs_no_fused_kernel(self, session: Load) -> None:
        chosen = [
            "caching=deepcache",
            "attention=math",
            "compiler=cuda_graphs",
            "compiler.targets=[denoiser]",
        ]
        proof = session(*chosen)._assembly.proofs["attention"]
        for kernel, engaged in (
            ("softmax_warp_forward", True),
            ("fmha_cutlassF_f32", False),
        ):
            assert proof(Trace(kernels=Counter([kernel]))).engaged == engaged

    def test_autocast_keeps_no_casts_within_a_capture(self, stubs: StubGraphs) -> None:
        seen = []
        layer = torch.nn.Linear(3, 2)
        layer.register_forward_pre_hook(
            lambda *_: seen.append(torch.is_autocast_cache_enabled())
        )
        PerShape(layer, Capture())(torch.ones(1, 3))
        assert set(seen[:-1]) == {False}
        assert torch.is_autocast_cache_enabled()

    def test_every_call_of_every_target_is_a_replay(self, session: Load) -> None:
        proof = CudaGraphs().apply(session()._pipe)
        stages = {"text_encoder": 2, "denoiser": 2, "vae_decoder": 1}
        for launches, engaged in (
            ((2, 2, 1), True),
            ((2, 0, 1), False),
            ((2, 1, 1), False),
            ((0, 2, 1), False),
        ):
            trace = Trace()
            for (stage, calls), count in zip(stages.items(), launches, strict=True):
                trace.stages[stage].calls, trace.stages[stage].graph_launches = (
                    calls,
                    count,
                )
            assert proof(trace).engaged == engaged, launches


class TestAnyShape:
    @pytest.mark.parametrize(("guidance", "batches"), [(4, {2, 3}), (1, {1})])
    def test_another_shape_is_called_as_the_pipeline_calls(
        self,
        session: Load,
        monkeypatch: pytest.MonkeyPatch,
        guidance: int,
        batches: set[int],
    ) -> None:
        """What is around a call is a part of what is compiled: without it, the evidence would be a compilation."""
        seen: list[tuple[tuple[int, ...], bool]] = []

        class Noting(StandIn):
            def forward(self, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                seen.append((tuple(sample.shape), torch.is_inference_mode_enabled()))
                return self._orig_mod(sample, *args, **kwargs)

        monkeypatch.setattr(torch, "compile", lambda module, **_: Noting(module))
        guided = f"workload.guidance_scale={guidance}"
        host = session(
            "compiler=inductor_dynamic", "grad_mode=inference_mode", TWO_STEPS, guided
        )
        trace = Trace(call=host._call)
        trace.denoiser.operators["Torch-Compiled Region: 0/0"] = (
            trace.denoiser.calls
        ) = 2
        found = host._assembly.proofs["compiler"](trace)
        assert found.engaged, (
            "whichever pipeline of this process the graphs were compiled for"
        )
        assert "compiled before" in found.summary
        shapes, modes = zip(*seen, strict=True)
        assert len(set(shapes)) == 2
        assert {shape[0] for shape in shapes} == batches
        assert set(modes) == {True}


BLOCK = "mid_block.attentions.0.transformer_blocks.0"


class TestPackages:
    def test_lie_in_a_folder_of_the_users_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        folder = aot.private_folder("aot")
        assert folder == tmp_path / "sdopt" / "aot"
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o770)
        with pytest.raises(
            UnavailableError, match="only you may have access: chmod 700"
        ):
            aot.private_folder("aot")

    @pytest.mark.parametrize(
        "option", ["aot", "inductor compiler.keep=true", "regional compiler.keep=true"]
    )
    def test_a_folder_that_cannot_be_written_is_named_before_anything_is_measured(
        self,
        option: str,
        variant: Compose,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        chosen = variant(*f"compiler={option}".split())
        assert not [each for each in chosen.conflicts(CPU) if "XDG_CACHE_HOME" in each]
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        [said] = [each for each in chosen.conflicts(CPU) if "XDG_CACHE_HOME" in each]
        assert f"goes to {tmp_path}/file/sdopt/" in said
        assert f"{tmp_path}/file is no folder" in said
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "triton"))
        assert any(
            "name another folder with TRITON_CACHE_DIR=" in each
            for each in chosen.conflicts(CPU)
        )

    @staticmethod
    def digest(unet: Any, rows: int = 2) -> str:
        given = (
            torch.zeros(rows, unet.config.in_channels, 8, 8, dtype=unet.dtype),
            torch.tensor(1),
        )
        return aot.digest(Tensors(unet, given, {"return_dict": False}))

    def test_are_told_apart_by_what_their_code_depends_on(self, session: Load) -> None:
        plain, style = session()._pipe, session("lora=loaded")._pipe
        found = [
            self.digest(plain.unet),
            self.digest(plain.unet, rows=4),
            self.digest(style.unet),
        ]
        assert [
            self.digest(session(*chosen)._pipe.unet)
            for chosen in ((), ("lora=loaded",))
        ] == [found[0], found[2]]
        style.set_adapters("sdopt", adapter_weights=0.5)
        found.append(self.digest(style.unet))
        for option in (Layout("channels_last"), Vanilla(), Sdpa("math")):
            option.apply(plain)
            found.append(self.digest(plain.unet))
        found.append(self.digest(plain.unet.to(torch.bfloat16)))
        assert len(set(found)) == len(found)

    @pytest.mark.parametrize(
        "change",
        [
            lambda unet: unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4),
            lambda unet: (
                next(each for each in unet.modules() if hasattr(each, "scaling"))
                .scaling["sdopt"]
                .fill_(0.25)
            ),
            lambda unet: setattr(
                unet.get_submodule(f"{BLOCK}.attn1"), "upcast_attention", True
            ),
        ],
        ids=["FreeU", "a LoRA's alpha", "Stable Diffusion 2"],
    )
    @pytest.mark.walk(2)
    def test_are_told_apart_by_attributes_of_modules(
        self, session: Load, change: Callable[[Any], Any]
    ) -> None:
        unet = session("lora=hotswap")._pipe.unet
        before = self.digest(unet)
        change(unet)
        assert self.digest(unet) != before

    def test_do_not_depend_on_the_order_of_sets_or_on_where_a_model_was_loaded_from(
        self, session: Load
    ) -> None:
        unet = session()._pipe.unet
        attention = unet.mid_block.attentions[0]
        assert len(attention.config["_use_default_values"]) > 1
        attention.some = {
            0,
            2**61 - 1,
        }  # of one hash, by which the order is that of insertion
        before = self.digest(unet)
        unet.register_to_config(_name_or_path="elsewhere", _diffusers_version="0.1.0")
        attention.some = {2**61 - 1, 0}
        attention.register_to_config(
            _use_default_values=attention.config["_use_default_values"][::-1]
        )
        assert self.digest(unet) == before
        attention.some = {1}
        assert self.digest(unet) != before

    def test_are_told_apart_by_the_files_of_their_code(
        self, session: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A class may keep its name while its code changes."""
        monkeypatch.syspath_prepend(tmp_path)
        unet, found = session()._pipe.unet, []
        for factor in (2, 3):
            (tmp_path / "my_processor.py").write_text(
                "from diffusers.models.attention_processor import AttnProcessor\n\n"
                f"class Mine(AttnProcessor):\n    def scaled(self, query):\n        return {factor} * query\n"
            )
            sys.modules.pop("my_processor", None)
            aot._code_of.cache_clear()
            unet.set_attn_processor(import_module("my_processor").Mine())
            found.append(self.digest(unet))
        assert len(set(found)) == 2

    def test_say_what_they_cost_when_they_were_compiled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def compiled(call: Tensors, package: Path) -> None:
            package.touch()

        monkeypatch.setattr(aot, "_compile", compiled)
        monkeypatch.setattr(aot, "_load", lambda call, package: call.module)
        call = Tensors(torch.nn.Linear(2, 2), (torch.ones(1, 2),), {})
        compilation.reset()
        aot.Packages(tmp_path, recompile=False).graph_of(call)
        assert compilation.packages_so_far() == (1, 0.0)
        [cost] = tmp_path.glob("*.json")
        cost.write_text('{"compile_s": 40.5}')
        aot.Packages(tmp_path, recompile=False).graph_of(call)
        assert compilation.packages_so_far() == (1, 40.5)
        cost.write_text("[]")
        aot.Packages(tmp_path, recompile=False).graph_of(call)
        assert compilation.packages_so_far() == (1, 40.5)
        aot.Packages(tmp_path, recompile=True).graph_of(call)
        assert compilation.packages_so_far() == (1, 40.5), (
            "a new process would compile again"
        )

    def test_are_for_one_number_of_threads(self) -> None:
        """Inductor generates loops and arrays for the threads that there are: with more, they would be overrun."""
        layer = torch.nn.Linear(2, 2)
        threads, found = torch.get_num_threads(), set()
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                found.add(aot.digest(Tensors(layer, (torch.ones(1, 2),), {})))
        finally:
            torch.set_num_threads(threads)
        assert len(found) == 2


class TestInductorTargets:
    """Proof by target; what is compiled really is in the slow tests."""

    def test_each_must_have_run(
        self, session: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch, "compile", lambda module, **_: StandIn(module))
        pipe = session()._pipe
        proof = Inductor(targets=["denoiser", "decoder"]).apply(pipe)
        assert isinstance(pipe.unet, StandIn)
        assert isinstance(pipe.vae.decoder, StandIn)
        assert not isinstance(pipe.text_encoder, StandIn)
        for regions, engaged in (
            ({"denoiser": 2, "vae_decoder": 1}, True),
            ({"denoiser": 2}, False),
            (
                {"denoiser": 1, "vae_decoder": 1},
                False,
            ),  # TorchDynamo ran one call eagerly
        ):
            trace = Trace()
            for stage, count in regions.items():
                trace.stages[stage].operators["Torch-Compiled Region: 0/0"] = count
            trace.denoiser.calls, trace.stages["vae_decoder"].calls = 2, 1
            found = proof(trace)
            assert found.engaged == engaged
            assert f"denoiser {regions['denoiser']}" in found.summary
            assert engaged != ("which are not all of" in found.summary)


class TestRegional:
    """Proof of the repeated blocks; what is compiled really is in the slow tests."""

    def test_no_layer_of_a_block_may_have_run_eagerly(self, session: Load) -> None:
        pipe = session()._pipe
        proof = Regional().apply(pipe)
        inner = "mid_block.attentions.0.transformer_blocks.0.norm1"
        assert {"conv_in", inner} <= {name for name, _ in pipe.unet.named_modules()}
        for regions, eager, engaged in (
            (7, ["conv_in"], True),
            (3, ["conv_in"], True),  # most steps left blocks out
            (0, ["conv_in"], False),
            (7, [], False),  # a trace that shows no layers at all shows no eager ones
            (6, ["conv_in", inner], False),
        ):
            trace = Trace()
            trace.denoiser.calls = 4
            trace.denoiser.operators["Torch-Compiled Region: 0/0"] = regions
            trace.denoiser.ran.update(eager)
            found = proof(trace)
            assert found.engaged == engaged
            assert (inner in eager) == (
                "layers of them that ran eagerly: 1" in found.summary
            )


@pytest.mark.gpu
@pytest.mark.parametrize("caching", ["none", "deepcache"])
@pytest.mark.parametrize(
    "compiler",
    [
        ["compiler=cuda_graphs"],
        ["compiler=inductor", "compiler.mode=reduce-overhead"],
        [
            "compiler=inductor",
            "compiler.mode=reduce-overhead",
            "compiler.targets=[text_encoder,denoiser,decoder]",
        ],
    ],
    ids=["CUDA graphs", "Inductor", "Inductor of every target"],
)
def test_graphs_on_a_card_replay_and_give_the_latents_of_eager(
    on_cuda: Load, tmp_path: Path, compiler: list[str], caching: str
) -> None:
    """As in a study: calls that are timed come first, and compile; then nothing may be captured again."""
    torch._dynamo.reset()
    work = ["precision=fp16", f"caching={caching}", "workload.steps=6"]
    compiled = on_cuda(*work, *compiler)
    for _ in range(2):
        compiled.time_once()
    found = {item.axis: item for item in compiled.prove().evidence}
    assert all(item.engaged for item in found.values()), found
    assert found["compiler"].facts["graph_launches"] > 0
    ours, plain = (
        latents(compiled, tmp_path / "compiled"),
        latents(on_cuda(*work), tmp_path / "eager"),
    )
    assert float((ours - plain).abs().mean()) < 0.05 * float(plain.std())


class TestKeptCode:
    @pytest.mark.slow
    def test_a_later_process_reads_it(self, tmp_path: Path) -> None:
        code = f"""
            import torch
            from pathlib import Path
            from sdopt.measure import compilation
            compilation.reset()
            compilation.keep_in(Path({str(tmp_path)!r}))
            print(torch.compile(lambda x: x.sin() + x.cos())(torch.ones(8)).sum())
            compilation.note_cost()
            print(*compilation.kept_so_far(), compilation.packages_so_far()[1] > 0)
        """
        told = [
            subprocess.run(
                [sys.executable, "-c", textwrap.dedent(code)],
                capture_output=True,
                text=True,
                check=True,
            )
            for _ in range(2)
        ]
        assert [one.stdout.splitlines()[-1] for one in told] == [
            "1 0 False",
            "0 1 True",
        ]

    def test_counts_what_inductor_wrote_and_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            monkeypatch.setenv(name, "before")
        compilation.reset()
        counters["inductor"]["fxgraph_cache_miss"] = 2
        assert compilation.packages_so_far() == (0, 0.0), "nothing is kept"
        compilation.keep_in(tmp_path)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
        assert compilation.packages_so_far() == (2, 0.0)
        compilation.note_cost()
        [cost] = tmp_path.glob("*.json")
        cost.write_text('{"compile_s": 40.5}')
        compilation.reset()
        compilation.keep_in(tmp_path)
        assert compilation.packages_so_far() == (0, 0.0)
        counters["inductor"]["fxgraph_cache_hit"] = 1
        assert compilation.packages_so_far() == (0, 40.5)
        compilation.note_cost()
        assert "40.5" in cost.read_text(), "this process compiled nothing"
        compilation.reset()
        assert compilation.packages_so_far() == (0, 0.0)
