"""The code of a worker process: `serve` answers requests, and `PipelineHost` loads and calls its one pipeline."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from sdopt.assembly import Assembly
from sdopt.errors import os_problem, with_type
from sdopt.hardware.device import Device
from sdopt.hardware.nvml import GpuMonitor
from sdopt.hardware.probe import default_threads
from sdopt.measure.compilation import compiled_so_far, note_cost, packages_so_far
from sdopt.measure.garbage import garbage_of_block_collected
from sdopt.measure.memory import PeakMemory, StagePeaks, cap_memory
from sdopt.measure.processes import waited_s
from sdopt.measure.stages import DENOISER, StageClock, observed
from sdopt.measure.trace import trace_call
from sdopt.options.base import Inputs
from sdopt.pipelines.factory import Built, remember
from sdopt.pipelines.family import Latents
from sdopt.pipelines.latents import spatial
from sdopt.pipelines.loading import call_arguments, family_of, guidance_of
from sdopt.pipelines.parts import denoiser_of
from sdopt.pipelines.prompts import cut_from, read_latents
from sdopt.pipelines.tasks import noise_in_float32
from sdopt.record.records import Status
from sdopt.record.samples import Evidence, Memory
from sdopt.scratch import named_caches
from sdopt.variant import Variant
from sdopt.worker.child import Message
from sdopt.worker.draws import Draw, timed_draw
from sdopt.worker.guidance import scales_embedded
from sdopt.worker.inputs import asked_inputs, prompts_and_noise
from sdopt.worker.operations import tflop_per_image
from sdopt.worker.protocol import (
    Asked,
    Batch,
    Rendered,
    SampledImage,
    StagedCall,
    TimedCall,
    TracedCall,
    WorkerError,
)

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


def serve(
    connection: Connection,
    variant: Variant,
    made: Built | None,
    device: Device,
    log: Path,
    cache: Path,
) -> None:
    """Answers the requests of a `Worker`, until it closes its end of the pipe.

    Sends a note before each answer: the seconds spent in calls of the pipeline. `made` describes the model, if a
    function builds it.
    """
    try:
        with log.open("a", encoding="utf-8", buffering=1) as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
    except (
        OSError
    ) as error:  # a full disk; the terminal is not for a worker's traceback
        failure = WorkerError(Status.FAILED, os_problem(error))
        with suppress(EOFError, OSError):
            connection.recv()
            connection.send(("failure", failure))
        return
    # Where memory runs out, the kernel shall end a worker, which is tried again, and not the server that starts them.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    os.environ |= variables(device, cache)
    if made is not None:
        remember(variant.model, made)
    # tqdm's default lock is a semaphore between processes, which a killed worker would leave behind.
    tqdm.set_lock(threading.RLock())
    host = PipelineHost(variant, device)
    # Below the study's own folder, which is removed even if this process is killed: weights may be offloaded there.
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=cache, ignore_cleanup_errors=True
    ) as tempfile.tempdir:
        os.environ["TMPDIR"] = tempfile.tempdir  # for compilers, and PyTorch's own C++
        while True:
            try:
                request, args, kwargs = connection.recv()
            except (EOFError, OSError):
                return
            before = host.in_calls_s
            answer: Message
            try:
                answer = "reply", getattr(host, request)(*args, **kwargs)
            except Exception as error:
                traceback.print_exc()
                answer = "failure", describe_error(error)
            with suppress(OSError):  # nobody waits for it any more
                connection.send(("note", host.in_calls_s - before))
                connection.send(answer)


def variables(device: Device, cache: Path) -> dict[str, str]:
    """Returns the environment variables that libraries in a worker read; compilers keep what they make in `cache`."""
    # Compilers and libraries with Triton kernels keep these, and their tuning results, in folders of the user, so the
    # cold start would depend on earlier runs. A folder that the user named is used, and is recorded with the study.
    folders = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache / "triton"}
    caches = {name: str(folder) for name, folder in folders.items()} | named_caches()
    # If there is a card, SDNQ starts CUDA on import, and uses that card's kernels even for tensors on the CPU.
    sdnq = {} if device.is_cuda else {"SDNQ_DEVICE": "cpu"}
    return caches | sdnq


class PipelineHost:
    """Holds one pipeline with its optimizations. Each public method answers one request of a `Worker`."""

    def __init__(self, variant: Variant, device: Device) -> None:
        self._variant = variant
        self._device = device
        self._memory = PeakMemory(device)
        self._monitor = GpuMonitor(device)
        self._assembly = Assembly(None, {})
        self._inputs: list[Inputs] = []
        self._given: torch.Tensor | None = None
        self._last: torch.Tensor | None = None
        self._settings = process_settings()
        self._threads = 1
        self.in_calls_s = 0.0
        """Seconds spent in calls of the pipeline, from prompts to images."""

    @property
    def _pipe(self) -> DiffusionPipeline:
        """The pipeline; it must have been prepared."""
        return self._assembly.pipe

    def hello(self) -> None:
        """Answers as soon as the process has started."""

    def prepare(self) -> float:
        """Loads the pipeline and applies the options (`Assembly.load`), and draws the noise; returns the seconds."""
        import torch

        variant, hardware = self._variant, self._variant.hardware
        # Imported objects are no garbage, and looking through them takes a fifth of a second.
        with garbage_of_block_collected():
            start = time.perf_counter()
            self._threads = hardware.threads or default_threads()
            self._use_threads(None)
            if self._device.is_cuda:
                torch.cuda.set_device(self._device.index)
            if hardware.emulate_memory and hardware.sheet is not None:
                cap_memory(self._device, hardware.sheet.memory_gib)
            self._assembly = Assembly.load(variant, self._device.torch_name)
            self._assembly.prepare_inputs(variant.texts)
            draws = [
                timed_draw(variant, shape_index)
                for shape_index in range(len(variant.shapes))
            ]
            self._inputs = [self._prompts_and_noise(0, draw) for draw in draws]
            self._synchronize()
            load_s = time.perf_counter() - start
        self._memory.loaded()
        return load_s

    def time_once(
        self,
        shape_index: int = 0,
        number: int = 0,
        memory: bool = False,
        every_image: bool = False,
    ) -> TimedCall:
        """Times one call, from prompts to images, at the shape with index `shape_index`.

        `number` is that of the batch of prompts and noise in `timed_draw`; after the last comes the first. `memory`
        says whether to measure the call's peak memory, too; `every_image`, whether to return all of its images.
        """
        compiled, packages = compiled_so_far(), packages_so_far()
        if memory:
            self._memory.watch()
        draw = timed_draw(self._variant, shape_index)
        before = self._monitor.throttled_ns()
        images, pixels, seconds = self._read_inputs(
            self._prompts_and_noise(number, draw), draw.size
        )
        state = self._monitor.state(before, seconds)
        peak = self._memory.read() if memory else None
        compile_s, graphs = (
            now - then for now, then in zip(compiled_so_far(), compiled, strict=True)
        )
        written, earlier_s = (
            now - then for now, then in zip(packages_so_far(), packages, strict=True)
        )
        if graphs:
            note_cost()
            gc.collect()  # what a compiler leaves
        held_gib = self._memory.held_gib()
        sample = self._sample(number, draw, images, pixels)
        every = tuple(self._every(number, draw, images, pixels)) if every_image else ()
        return TimedCall(
            seconds,
            state,
            held_gib,
            compile_s,
            int(graphs),
            int(written),
            earlier_s,
            peak,
            sample,
            every,
        )

    def _every(
        self, number: int, draw: Draw, images: np.ndarray, pixels: np.ndarray
    ) -> Iterator[SampledImage]:
        """Yields the images of a call with their latents, without those that fill up a short batch."""
        latents = self._final_latents(len(images))
        count = self._variant.workload.images_per_prompt
        start = number % draw.calls * draw.batch_size
        positions = draw.positions[start : start + draw.batch_size]
        for row, (position, image_index) in enumerate(product(positions, range(count))):
            finite = bool(
                np.isfinite(images[row]).all() and np.isfinite(latents[row]).all()
            )
            yield SampledImage(position, image_index, pixels[row], finite, latents[row])

    def _final_latents(self, count: int) -> np.ndarray:
        """Returns the final latents of the last call, float32 (n, channels, height, width); empty if it gave none."""
        if self._last is None:
            return np.empty((count, 0), np.float32)
        latents = spatial(self._last, self._latents_form)
        # With `grad_mode=enabled` they hold the graph of the whole call.
        array: np.ndarray = latents.detach().float().cpu().numpy()
        return array

    def _sample(
        self, number: int, draw: Draw, images: np.ndarray, pixels: np.ndarray
    ) -> SampledImage:
        """Returns one image of a call, at a position that changes from call to call."""
        image = number % len(pixels)
        prompt, image_index = divmod(image, self._variant.workload.images_per_prompt)
        position, finite = (
            number * draw.batch_size + prompt,
            bool(np.isfinite(images[image]).all()),
        )
        return SampledImage(
            position % len(draw.prompts), image_index, pixels[image], finite
        )

    def memory_so_far(self) -> Memory:
        """Returns the peak memory of all calls since it was measured last."""
        return self._memory.read()

    def _read_inputs(
        self, inputs: Inputs, size: int, **changes: Any
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Makes one call, and reads its images within the measured time: only then are they complete.

        Timed calls, calls of the quality pass and calls of a server are all made here, so that they are made alike.
        Python collects garbage in them as it does in a user's program, over all objects: in a call that leaves little
        it never does, and an option that makes it do so is that slow.

        Returns:
            the images as floats and as bytes, (n, height, width, 3), and the seconds that it took.

        Raises:
            RuntimeError: the call changed one of its inputs, or did not make the images that it was asked for.
        """
        import torch

        noise = inputs["latents"].clone() if "latents" in inputs else None
        prompts = list(inputs["prompt"])
        self._last = None
        gc.collect(1)  # the garbage of the call before, and not through older objects
        self._synchronize()
        start = time.perf_counter()
        images, pixels = _arrays(self._call(inputs=inputs, **changes))
        self._synchronize()
        seconds = time.perf_counter() - start
        if noise is not None and not torch.equal(noise, inputs["latents"]):
            raise RuntimeError("it modifies the caller's noise tensor in place")
        if inputs["prompt"] != prompts:
            raise RuntimeError("it modifies the caller's list of prompts in place")
        self._require_asked(pixels, inputs, size)
        return images, pixels, seconds

    def _require_asked(self, pixels: np.ndarray, inputs: Inputs, size: int) -> None:
        """Raises RuntimeError if a call made fewer, more, smaller or larger images than its inputs ask for."""
        asked = (len(inputs["generator"]), size, size, 3)
        if pixels.shape != asked:
            raise RuntimeError(f"expected images of shape {asked}, got {pixels.shape}")

    def render(
        self, asked: Sequence[Asked], batch_size: int, changes: dict[str, Any]
    ) -> Rendered:
        """Draws images that a server was asked for, in one call, whose batch the last of them fills up.

        Either all or none have a negative prompt. `changes` are arguments that differ from the workload's.
        """
        graphs = compiled_so_far()[1]
        filled = [*asked, *[asked[-1]] * (batch_size - len(asked))]
        negatives = (
            None
            if asked[0].negative is None
            else [image.negative or "" for image in filled]
        )
        prompts, seeds = (
            [image.prompt for image in filled],
            [image.seed for image in filled],
        )
        size = self._variant.size
        inputs = asked_inputs(
            self._variant,
            self._pipe,
            self._device.torch_name,
            size,
            prompts,
            negatives,
            seeds,
        )
        scales = [
            image.guidance_scale for image in filled if image.guidance_scale is not None
        ]
        with (
            scales_embedded(denoiser_of(self._pipe), scales)
            if scales
            else nullcontext()
        ):
            images, pixels, seconds = self._read_inputs(inputs, size, **changes)
        finite = [bool(np.isfinite(image).all()) for image in images[: len(asked)]]
        recompiled = int(compiled_so_far()[1] - graphs)
        return Rendered(
            pixels[: len(asked)],
            finite,
            seconds,
            recompiled,
            self._memory.held_gib(),
            [self._cut(image) for image in asked],
        )

    def _cut(self, image: Asked) -> str:
        """Returns what of an image's prompts no text encoder reads."""
        texts = {"prompt": image.prompt, "negative_prompt": image.negative or ""}
        cuts = []
        for field, text in texts.items():
            if cut := cut_from(text, self._pipe, self._variant.model):
                cuts.append(f"{field}: {cut}")
        return "; ".join(cuts)

    def measure_energy(self, seconds: float) -> float | None:
        """Returns the joules of one call, as the mean of back-to-back calls; None if the machine has no counter.

        The device's counter advances about ten times a second, which is too coarse for one short call.
        """
        before, calls, start = self._monitor.energy_j(), 0, time.perf_counter()
        if before is None:
            return None
        while time.perf_counter() - start < seconds:
            _arrays(self._call())
            self._synchronize()
            calls += 1
        after = self._monitor.energy_j()
        return None if after is None else (after - before) / calls

    def prove(self, shape_index: int = 0) -> TracedCall:
        """Traces a call of as few steps as show every optimization, and asks each whether it took effect."""
        self._use_threads(None)
        steps = min(
            self._assembly.traced_steps(self._variant.task.strength),
            self._variant.workload.steps,
        )

        def call() -> Any:
            return self._call(shape_index, num_inference_steps=steps, output_type="pil")

        trace = trace_call(self._pipe, call, self._device.is_cuda)
        evidence = []
        for axis, finding in self._assembly.findings(trace).items():
            # Plain JSON, so that no value in a proof prevents the result from being written.
            facts = json.loads(json.dumps(finding.facts, default=str))
            evidence.append(
                Evidence(
                    axis,
                    self._variant.choices[axis],
                    finding.engaged,
                    finding.summary,
                    facts,
                )
            )
        return TracedCall(
            evidence,
            trace.denoiser_busy_s,
            trace.counts(),
            changed_settings(self._settings),
        )

    def time_stages(self) -> StagedCall:
        """Times each stage of one instrumented call, of the denoiser each step, and measures its peak of memory.

        The pipeline draws the noise of this call itself, from the seeds, as for any user who passes no noise.
        """
        import torch

        self._use_threads(None)
        clock = StageClock(self._device.is_cuda)
        draw = timed_draw(self._variant)
        number = (
            draw.calls // 2
        )  # not the first: a pipeline that ignores seeds may use the same default seed
        inputs = self._prompts_and_noise(number, draw)
        if (
            self._variant.workload.latents is None
            and inputs.pop("latents", None) is not None
        ):
            seeds = [generator.initial_seed() for generator in inputs["generator"]]
            inputs["generator"] = [
                torch.Generator().manual_seed(seed) for seed in seeds
            ]
        peaks = StagePeaks(self._memory)

        def enter(stage: str) -> None:
            peaks.enter(stage)
            clock.enter(stage)

        def leave(stage: str, output: Any) -> None:
            clock.leave(stage, output)  # what reads memory is not timed
            peaks.leave(stage, output)

        with observed(self._pipe, enter, leave):
            images, pixels = _arrays(self._call(inputs=inputs))
        self._synchronize()
        self._require_asked(pixels, inputs, draw.size)
        # Both prompts (with and without guidance) count as one sample of their stage; each step is its own sample.
        stages_s = {}
        for stage, spans in clock.seconds().items():
            if stage == DENOISER:
                stages_s["denoiser_step"] = spans
            else:
                stages_s[stage] = [sum(spans)]
        return StagedCall(
            stages_s, self._sample(number, draw, images, pixels), peaks.gib
        )

    def count_operations(self) -> float:
        """Returns the TFLOP of one image."""
        self._use_threads(None)
        return tflop_per_image(
            self._pipe, self._variant, lambda: self._call(num_inference_steps=1)
        )["total"]

    def generate(self, batch: int, draw: Draw, folder: Path) -> Batch:
        """Makes the images of one batch of a draw and stores them losslessly in `folder`, each beside its latents."""
        folder.mkdir(parents=True, exist_ok=True)
        # Floats, too, because bytes cannot distinguish NaN from black.
        self._use_threads(draw.threads)
        waited = waited_s()
        images, pixels, seconds = self._read_inputs(
            self._prompts_and_noise(batch, draw), draw.size
        )
        # Never zero, even for a call that mostly waited: the kernel's clock differs from this one.
        worked_s = max(seconds - (waited_s() - waited), seconds / 100)
        held_gib = self._memory.held_gib()
        count = self._variant.workload.images_per_prompt
        records = [
            draw.stored(image, count, folder)
            for image in self._every(batch, draw, images, pixels)
        ]
        return Batch(records, worked_s, held_gib)

    def _use_threads(self, count: int | None) -> None:
        """Sets the number of threads from now on; None is that of timed calls."""
        import torch

        threads = count or self._threads
        if (
            torch.get_num_threads() != threads
        ):  # PyTorch forgets what it has prepared, whatever the number was before
            torch.set_num_threads(threads)

    def _prompts_and_noise(self, index: int, draw: Draw) -> Inputs:
        """Returns the prompts and the initial noise of one call."""
        if self._given is None and self._variant.workload.latents is not None:
            self._given = read_latents(self._variant.workload.latents)
        return prompts_and_noise(
            self._variant, self._pipe, self._device.torch_name, self._given, index, draw
        )

    def _call(
        self, shape_index: int = 0, inputs: Inputs | None = None, **changes: Any
    ) -> Any:
        """Makes one call of the pipeline, with `changes` of its arguments.

        `inputs` are prompts and noise, before the options change them: by default the first batch's at a shape.
        """
        start = time.perf_counter()
        try:
            workload = self._variant.workload
            scale = guidance_of(self._variant.model).argument
            keep = (
                self._keep_latents
                if self._latents_form.last == "callback_on_step_end"
                else self._keep_last
            )
            arguments = {
                "num_inference_steps": workload.steps,
                scale: self._variant.guidance_scale,
                "num_images_per_prompt": workload.images_per_prompt,
                # Arrays and the final latents in every call, so that no option can tell calls apart.
                "output_type": "np",
                self._latents_form.last: keep,
                **call_arguments(self._variant.model),
                **self._assembly.changed(
                    self._inputs[shape_index] if inputs is None else inputs
                ),
            }
            if "guidance_scale" in changes:
                changes[scale] = changes.pop("guidance_scale")
            arguments |= self._assembly.call_kwargs | changes
            # Copies, so that a call with the same inputs draws the same noise.
            arguments["generator"] = [
                generator.clone_state() for generator in arguments["generator"]
            ]
            with noise_in_float32(self._pipe), self._assembly.entered():
                return self._pipe(**arguments)
        finally:
            self.in_calls_s += time.perf_counter() - start

    @property
    def _latents_form(self) -> Latents:
        """How the pipeline takes latents, and gives them back."""
        return family_of(self._variant.model).latents

    def _keep_last(self, _step: int, _timestep: Any, latents: torch.Tensor) -> None:
        self._last = latents

    def _keep_latents(
        self, _pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        self._last = tensors["latents"]
        return tensors

    def _synchronize(self) -> None:
        import torch

        if self._device.is_cuda:
            torch.cuda.synchronize()


def _arrays(output: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images of a call, (n, height, width, 3), as floats in 0…1 and as bytes; NaN is an arbitrary byte."""
    images = np.asarray(output.images, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        scaled = images.clip(0, 1)
        scaled *= 255
        return images, scaled.round(out=scaled).astype(np.uint8)


_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "status_alloc_failed",  # of cuBLAS and of cuDNN
    "device_allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "workspace can't be allocated",  # of DeepSpeed
    "workspace is null",  # of DeepSpeed, too
)

_MAYBE_OUT_OF_MEMORY = (
    "cublas_status_not_initialized",
    "cudnn_status_not_initialized",
    "cudnn_status_internal_error",
    "unable to find an engine",
    "busy or unavailable",  # also raised in exclusive compute mode, for all processes but one
    "api call failed at",  # raised by AOTInductor's code, which only prints the cause
    "failed to map segment",  # raised on loading a library; also if its folder is mounted noexec
)
"""Messages of libraries that could not allocate a handle or a workspace; some have other causes, too."""


def describe_error(error: Exception) -> WorkerError:
    """Returns the WorkerError for an error; recognises running out of memory even if a compiler wrapped it."""
    import torch

    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = (
            getattr(cause, "inner_exception", None)
            or cause.__cause__
            or cause.__context__
        )
    text = "\n".join(str(link).lower() for link in chain)
    kinds = (torch.OutOfMemoryError, MemoryError)
    out_of_memory = any(isinstance(link, kinds) for link in chain)
    out_of_memory |= any(words in text for words in _OUT_OF_MEMORY)
    maybe = any(words in text for words in _MAYBE_OUT_OF_MEMORY)
    reason = with_type(error)
    return WorkerError(
        Status.OUT_OF_MEMORY if out_of_memory else Status.FAILED,
        reason,
        may_be_memory=maybe,
    )


def process_settings() -> dict[str, object]:
    """Returns settings that affect not only a pipeline but the whole program."""
    import torch

    return {
        "Python's garbage collection": gc.isenabled(),
        "the thresholds of Python's garbage collection": gc.get_threshold(),
        "PyTorch's default type": torch.get_default_dtype(),
        "PyTorch's mode of gradients": torch.is_grad_enabled(),
        "the cores that the process may use": sorted(os.sched_getaffinity(0)),
        "the priority of the process": os.getpriority(os.PRIO_PROCESS, 0),
    }


def changed_settings(before: dict[str, object]) -> list[str]:
    """Returns the settings that have changed since `before`, each with both values."""
    return [
        f"{name} ({before[name]} before, {now} now)"
        for name, now in process_settings().items()
        if now != before[name]
    ]
