"""Loads a pipeline, applies options to it, calls it, and proves that they took effect."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from sdopt.errors import ConflictError
from sdopt.measure.trace import Trace
from sdopt.options.base import Finding, Inputs, Optimization, Proof, loading_arguments
from sdopt.options.patch import Patch
from sdopt.pipelines.loading import call_arguments, load_pipeline
from sdopt.pipelines.parts import CALL, Pipeline, called
from sdopt.record.choices import as_choice, is_plain
from sdopt.variant import Variant


@dataclass
class Assembly:
    """A pipeline and the options that were applied to it.

    Attributes:
        pipe: the pipeline.
        options: the options by axis, in the order in which they were applied.
        proofs: the proofs by axis; each judges its option by the trace of a call.
        choices: the names of the options by axis.
    """

    pipe: Pipeline
    options: Mapping[str, Optimization]
    proofs: dict[str, Proof] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    _changes: list[Callable[[Inputs], Inputs]] = field(default_factory=list)

    @classmethod
    def load(cls, variant: Variant, device: str) -> "Assembly":
        """Loads the pipeline of a variant with `load_pipeline`, as its options ask for, and applies the options.

        Args:
            variant: the model, its scheduler and task, and the options.
            device: PyTorch's name of the device.

        Raises:
            UsageError: files are missing.
            ConflictError: an option would leave out what the user's own code has built or changed.
        """
        import torch

        options = dict(variant.applied)
        for option in options.values():
            option.begin_process()
        arguments = loading_arguments(options.values())
        dtype = arguments.get("dtype", torch.float32)
        for option in options.values():
            arguments |= option.parts(variant.model, dtype)
        on_host = any(option.loads_on_host for option in options.values())
        pipe = load_pipeline(
            variant.model, variant.scheduler, variant.task, device, arguments, on_host
        )
        pipe.__dict__[CALL] = call_arguments(variant.model)
        assembly = cls(pipe, options, choices=variant.choices)
        if variant.model.weights == "factory":
            _require_none(assembly.left_out(options))
        assembly.apply()
        return assembly

    @classmethod
    def of(cls, pipe: Pipeline, options: Mapping[str, Optimization]) -> "Assembly":
        """Applies options to a pipeline, in their order."""
        assembly = cls(pipe, options)
        assembly.apply()
        return assembly

    def apply(self) -> None:
        """Applies the options, in their order; if one fails, `proofs` shows which were applied before it."""
        for axis, option in self.options.items():
            is_own = isinstance(option, Patch)
            with self._nothing_left_out() if is_own else nullcontext():
                self.proofs[axis] = option.apply(self.pipe)

    @contextmanager
    def _nothing_left_out(self) -> Iterator[None]:
        """Requires that options leave out nothing of what a user's functions do in the block.

        Those that come later may, and of the earlier ones those that go on running what they found.
        """
        axes = [
            axis
            for axis, option in self.options.items()
            if axis not in self.proofs or option.keeps_structure
        ]
        before = self.left_out(axes)
        yield
        _require_none([line for line in self.left_out(axes) if line not in before])

    def left_out(self, axes: Iterable[str]) -> list[str]:
        """Returns what options of some axes would leave out of the pipeline, of which diffusers' own have nothing.

        A compiler's graph has what users' code computes when it is recorded.
        """
        lines = []
        for axis in axes:
            option, choice = self.options[axis], self.choices.get(axis, "")
            if not option.compiles and not is_plain(axis, choice):
                reasons = option.bypassed(self.pipe)
                lines += [f"{as_choice(axis, choice)}: {line}" for line in reasons]
        return lines

    def prepare_inputs(self, prompts: Sequence[str]) -> None:
        """Lets the options compute once the values that depend on prompts alone; `prompts` are those of all calls."""
        preparing = [
            option for option in self.options.values() if option.prepares_inputs
        ]
        if preparing:
            with self.entered():
                changes = [
                    option.prepare_inputs(self.pipe, prompts) for option in preparing
                ]
            self._changes = [change for change in changes if change is not None]

    def changed(self, inputs: Inputs) -> Inputs:
        """Returns the prompts and the noise of a call as the options change them."""
        if self._changes and isinstance(inputs.get("prompt"), str):
            inputs = {**inputs, "prompt": [inputs["prompt"]]}
        for change in self._changes:
            inputs = change(inputs)
        # Z-Image writes into the list that it is given.
        lists = {
            name: [*inputs[name]]
            for name in ("prompt", "negative_prompt")
            if isinstance(inputs.get(name), list)
        }
        return {**inputs, **lists}

    @property
    def call_kwargs(self) -> Inputs:
        """Returns the arguments that the options add to each call."""
        arguments: Inputs = {}
        for option in self.options.values():
            arguments |= option.call_kwargs()
        return arguments

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the context managers that the options put around each call."""
        with called(self.pipe), ExitStack() as stack:
            for option in self.options.values():
                stack.enter_context(option.context(self.pipe))
            yield

    def traced_steps(self, strength: float) -> int:
        """Returns how many steps a traced call must be asked for to show every option.

        Args:
            strength: of an image-to-image task, which leaves out the other steps; 1 for all others.
        """
        calls = max(
            (option.traced_calls for option in self.options.values()), default=2
        )
        return math.ceil(calls / strength)

    def findings(self, trace: Trace) -> dict[str, Finding]:
        """Returns by axis what the trace of a call shows of each option."""
        return {axis: proof(trace) for axis, proof in self.proofs.items()}


def left_out_by(variants: Sequence[Variant], pipe: Pipeline) -> list[str]:
    """Returns what options of variants would leave out of the pipeline that a user's function has built, each once."""
    lines: dict[str, None] = {}
    for variant in variants:
        options = dict(variant.applied)
        assembly = Assembly(pipe, options, choices=variant.choices)
        lines |= dict.fromkeys(assembly.left_out(options))
    return [*lines]


def _require_none(problems: list[str]) -> None:
    if problems:
        raise ConflictError(problems)
