"""What a pipeline keeps of the options that were applied to it, and its calls, which run with what the options add."""

import functools
import gc
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from os import PathLike
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sdopt.assembly import Assembly
from sdopt.errors import ConflictError, UsageError
from sdopt.library.process import ProcessChanges
from sdopt.measure.compilation import runs_eagerly
from sdopt.options.assumptions import structure_of
from sdopt.options.base import Context, Optimization
from sdopt.pipelines.parts import denoiser_of, unwrapped
from sdopt.pipelines.snapshot import Snapshot
from sdopt.record.choices import as_choice

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

OPTIMIZED = "_sdopt_optimized"
"""Attribute of a pipeline that holds its `Optimized`, so that both are freed together."""

_PROMPT = "a photograph of a lighthouse"
"""The prompt of a traced call that names none."""

_COPIED = (
    "this pipeline is a copy of one that options were applied to, and still uses the original's modules: copy the "
    "pipeline before calling sdopt.optimize"
)


@dataclass(eq=False)
class Optimized:
    """The options that were applied to a pipeline, and the state before; None if it was loaded with them."""

    assembly: Assembly
    ctx: Context
    before: Snapshot | None
    prompts: tuple[str, ...] = ()
    """The prompts of all calls, as far as they were given in advance."""
    usual: dict[str, Any] = field(default_factory=dict)
    """Default arguments of a call."""
    process: ProcessChanges = field(default_factory=ProcessChanges)
    """What options left changed in the process."""
    number: int = field(default_factory=count().__next__)
    """Later ones are higher."""
    lock: Any = field(default_factory=RLock)
    """Held by a call: what options keep between steps and in the process is that of one call at a time."""
    structure: dict[str, Any] | None = None
    """The layers of the denoiser with their settings, if options keep what they were."""

    @property
    def sets_process(self) -> bool:
        """Whether an option sets something of the whole process while a call runs."""
        options = self.assembly.options.values()
        return any(option.sets_process for option in options)

    def require_fitting(
        self, pipe: "DiffusionPipeline", call: Mapping[str, Any]
    ) -> None:
        """Raises UsageError for a call that an option cannot make as it is asked for."""
        named = named_as_chosen(self.assembly.options, self.assembly.choices)
        asked = _defaults_of(type(pipe)) | dict(call)
        problems: list[str] = []
        for name, option in named.items():
            problems += [f"{name}: {reason}" for reason in option.refusals(asked)]
        if self.structure is not None and not runs_eagerly():
            now = self.structure_now(pipe)
            if changed := [
                name
                for name in now | self.structure
                if now.get(name) != self.structure.get(name)
            ]:
                keeping = ", ".join(
                    name for name, option in named.items() if option.keeps_structure
                )
                problems.append(
                    f"{keeping}: keeps the denoiser as it was, and the program has changed it since (at "
                    f"{changed[0] or 'its top'}): call sdopt.undo(pipe), change it, and apply the options again"
                )
        if problems:
            raise UsageError(problems)

    @contextmanager
    def fitting(
        self, pipe: "DiffusionPipeline", call: Mapping[str, Any]
    ) -> Iterator[None]:
        """Requires the call in the block to fit, and each of its steps, if code of the program runs between them."""
        self.require_fitting(pipe, call)
        with ExitStack() as stack:
            if self.structure is not None and (
                call.get("callback_on_step_end") or call.get("callback")
            ):
                denoiser = denoiser_of(pipe)
                step = denoiser.register_forward_pre_hook(
                    lambda *_: self.require_fitting(pipe, call)
                )
                stack.callback(step.remove)
            yield

    def structure_now(self, pipe: "DiffusionPipeline") -> dict[str, Any]:
        """Returns what `structure` is to be at each call."""
        graph = any(option.keeps_weights for option in self.assembly.options.values())
        return structure_of(unwrapped(denoiser_of(pipe)), graph)

    def prompts_that_show(self, images_per_prompt: int) -> list[str]:
        """Returns the prompts of a call in which every option can take effect: two if one would be too few."""

        def idle(batch_size: int) -> int:
            workload = replace(
                self.ctx.workload,
                batch_size=batch_size,
                images_per_prompt=images_per_prompt,
            )
            ctx = replace(self.ctx, workload=workload)
            return sum(
                bool(option.ineffective(ctx))
                for option in self.assembly.options.values()
            )

        return list(
            islice(cycle(self.prompts or [_PROMPT]), 2 if idle(2) < idle(1) else 1)
        )

    def shared_later(self) -> bool:
        """Returns whether options were applied to another pipeline since that has some of the same networks."""
        mine = self.before.networks if self.before else set()
        return any(
            applied.number > self.number
            and applied.before
            and mine & applied.before.networks
            for applied in APPLIED
        )

    def __deepcopy__(self, _memo: dict[int, Any]) -> None:
        """Leaves None in a copy of the pipeline: its hooks, closures and compiled code are those of the original."""


APPLIED: "WeakSet[Optimized]" = WeakSet()
"""Those of pipelines that still have their options."""

_PROCESS = RLock()


def whole_process() -> AbstractContextManager[Any]:
    """Returns what one thread at a time enters, if options of some pipeline set what the whole process uses.

    Calls that overlap would run with the settings of each other, and leave them behind.
    """
    shared = any(applied.sets_process for applied in tuple(APPLIED))
    return _PROCESS if shared else nullcontext()


def keep(pipe: "DiffusionPipeline", optimized: Optimized) -> None:
    """Stores the state in a pipeline, whose calls then run with the contexts and the arguments that its options add."""
    setattr(pipe, OPTIMIZED, optimized)
    APPLIED.add(optimized)
    assembly = optimized.assembly
    if any(option.keeps_structure for option in assembly.options.values()):
        optimized.structure = optimized.structure_now(pipe)
    cls: Any = type(pipe)
    call = cls.__call__
    names = [name for name in inspect.signature(call).parameters if name != "self"]
    # Image-to-image has no size, and text-to-image no strength.
    usual = {name: value for name, value in optimized.usual.items() if name in names}

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 (it is one)
        asked = dict(zip(names, args, strict=False)) | kwargs
        state_of(self)  # raises for a copy
        arguments = _fitted(usual, asked) | assembly.call_kwargs | asked
        with (
            whole_process(),
            optimized.lock,
            optimized.fitting(self, arguments),
            optimized.process.noted(),
            assembly.entered(),
        ):
            return call(self, **assembly.changed(arguments))

    members: dict[str, Any] = {"__call__": __call__, "__module__": cls.__module__}
    options = assembly.options.values()
    for option in options:
        for name, wrapper in option.wraps().items():
            members[name] = wrapper(getattr(cls, name))
    for option in options:
        for name, reason in option.comes_after(pipe).items():
            if hasattr(cls, name):
                members[name] = _refusing(reason, members.get(name, getattr(cls, name)))
    # diffusers writes the class's name into a folder that is saved, and looks it up in its own module.
    pipe.__class__ = type(cls.__name__, (cls,), members)


def _defaults_of(cls: type) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call that have a default."""
    parameters = inspect.signature(cls.__call__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }


def _refusing(reason: str, method: Any) -> Any:
    """Returns a method that refuses what has to come before the option, unless it only exchanges weights."""

    @functools.wraps(method)
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, OPTIMIZED, None) is None or kwargs.get("hotswap"):
            return method(self, *args, **kwargs)
        raise UsageError(reason)

    return refused


def _fitted(usual: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the usual arguments of a call; its negative prompt as often as there are prompts, as diffusers wants."""
    fitted = {name: value for name, value in usual.items() if name != "negative_prompt"}
    negative, embeddings = usual.get("negative_prompt"), given.get("prompt_embeds")
    if negative is not None and given.get("negative_prompt_embeds") is None:
        prompts = given.get("prompt") if embeddings is None else embeddings
        fitted["negative_prompt"] = (
            negative if isinstance(prompts, str) else [negative] * len(prompts or ())
        )
    return fitted


def state_of(pipe: "DiffusionPipeline") -> Optimized:
    """Returns what a pipeline keeps of its options. Raises UsageError if it has none, or is a copy of one that has."""
    if not hasattr(pipe, OPTIMIZED):
        raise UsageError(
            "no options were applied to this pipeline with sdopt.optimize or sdopt.load"
        )
    state: Optimized | None = getattr(pipe, OPTIMIZED)
    # A deep copy has none; a shallow one has the original's, whose options ask the original about its call.
    if state is None or state.assembly.pipe is not pipe:
        raise UsageError(_COPIED)
    return state


def require_plain(pipe: "DiffusionPipeline") -> None:
    """Raises UsageError for what is no pipeline, and if options were applied to it, or to the one it is a copy of."""
    if not hasattr(pipe, "components"):
        name = pipe if isinstance(pipe, str | PathLike) else type(pipe).__name__
        raise UsageError(
            f"{name}: sdopt.optimize takes a pipeline that is loaded; the command `sdopt optimize FILE` finds out what to "
            "turn on for a file"
        )
    from diffusers import ModularPipeline

    if isinstance(pipe, ModularPipeline):
        raise UsageError(
            f"{type(pipe).__name__}: a modular pipeline, whose guiders call the denoiser as no option knows; load the "
            "pipeline of one class"
        )
    if hasattr(pipe, OPTIMIZED):
        state = state_of(pipe)  # raises for a copy
        if state.before is None or state.before.lost():
            raise UsageError(
                "this pipeline already has options applied, which cannot be undone: load it again, and give all "
                "options at once"
            )
        raise UsageError(
            "this pipeline already has options applied; undo them first with sdopt.undo(pipe)"
        )


def require_one_attention(pipe: "DiffusionPipeline", assembly: Assembly) -> None:
    """Raises ConflictError if another pipeline of the same denoiser has another attention: one of them would not run."""
    chosen = _attention_of(assembly)
    if not chosen:
        return
    gc.collect()  # the other one may be waiting to be freed
    denoiser = unwrapped(denoiser_of(pipe))
    others = set()
    for applied in tuple(APPLIED):
        other = applied.assembly
        if unwrapped(denoiser_of(other.pipe)) is denoiser:
            others.add(_attention_of(other))
    if others := others - {"", chosen}:
        raise ConflictError(
            f"{chosen}: another pipeline of the same denoiser has {min(others)}, and only one of the two can run: undo it"
        )


def _attention_of(assembly: Assembly) -> str:
    if "attention" not in assembly.options:
        return ""
    return as_choice("attention", assembly.choices["attention"])


def named_as_chosen(
    options: Mapping[str, Optimization], choices: Mapping[str, str]
) -> dict[str, Optimization]:
    """Returns options by what chooses them, as in `attention=math`."""
    return {as_choice(axis, choices[axis]): option for axis, option in options.items()}


def as_prompts(prompts: Iterable[str] | None) -> tuple[str, ...]:
    """Returns prompts that a program gives, one or several of whatever collection. Raises UsageError for others."""
    texts = (
        (prompts,)
        if isinstance(prompts, str | PathLike)
        else ()
        if prompts is None
        else tuple(prompts)
    )
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise UsageError(
            f"prompts: {wrong[0]!r} is no text; give a text, or a list of texts"
        )
    return texts


def require_prompts(named: Mapping[str, Optimization], prompts: Sequence[str]) -> None:
    """Raises ConflictError if an option needs the prompts in advance, and none are given."""
    lacking = (
        []
        if prompts
        else [name for name, option in named.items() if option.prepares_inputs]
    )
    if lacking:
        raise ConflictError(
            [
                f"{name}: name the prompts of all calls with prompts=[…]"
                for name in lacking
            ]
        )
