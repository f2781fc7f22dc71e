"""Names the stages of a pipeline call, lets code run before and after each, and times them."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
from sdopt.pipelines.parts import denoiser_of, text_encoders_of

TEXT_ENCODER, VAE_ENCODER, DENOISER, VAE_DECODER = (
    "text_encoder",
    "vae_encoder",
    "denoiser",
    "vae_decoder",
)

STAGES = (TEXT_ENCODER, VAE_ENCODER, DENOISER, VAE_DECODER)

Enter = Callable[[str], None]

Leave = Callable[[str, Any], None]


@contextmanager
def observed(pipe: "DiffusionPipeline", enter: Enter, leave: Leave) -> Iterator[None]:
    """Calls `enter(stage)` and `leave(stage, output)` around each stage of every call made within the block.

    Forward hooks go on the outermost module, so that a compiled graph is neither entered nor recompiled.
    """
    modules = [(encoder, TEXT_ENCODER) for encoder in text_encoders_of(pipe)] + [
        (denoiser_of(pipe), DENOISER)
    ]
    with ExitStack() as stack:
        for module, stage in modules:
            before = module.register_forward_pre_hook(
                lambda *_, stage=stage: enter(stage)
            )
            stack.callback(before.remove)
            after = module.register_forward_hook(
                lambda _module, _args, output, stage=stage: leave(stage, output)
            )
            stack.callback(after.remove)
        for name, stage in (
            (("encode", VAE_ENCODER), ("decode", VAE_DECODER))
            if pipe.vae is not None
            else ()
        ):
            stack.enter_context(_observed_method(pipe.vae, name, stage, enter, leave))
        yield


@contextmanager
def _observed_method(
    vae: Any, name: str, stage: str, enter: Enter, leave: Leave
) -> Iterator[None]:
    # Forward hooks do not run for other methods of the VAE.
    method, before = getattr(vae, name), vae.__dict__.get(name)

    def observed_method(*args: Any, **kwargs: Any) -> Any:
        enter(stage)
        output = method(*args, **kwargs)
        leave(stage, output)
        return output

    vae.__dict__[name] = observed_method
    try:
        yield
    finally:
        if before is None:
            del vae.__dict__[name]
        else:
            vae.__dict__[name] = before


class StageClock:
    """Times the stages of one call, which do not overlap: by the wall clock, or on CUDA between events on its stream.

    Events do not serialise the call; they are read after a synchronise.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._entered: Any = None
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    def _mark(self) -> Any:
        import torch

        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def enter(self, stage: str) -> None:
        """Starts the time of a stage."""
        self._entered = self._mark()

    def leave(self, stage: str, _output: Any) -> None:
        """Ends the time of the stage that was entered last."""
        self._spans.setdefault(stage, []).append((self._entered, self._mark()))

    def seconds(self) -> dict[str, list[float]]:
        """Returns the seconds of each stage, a value per entry of the stage."""
        seconds: dict[str, list[float]] = {stage: [] for stage in self._spans}
        for stage, spans in self._spans.items():
            for start, end in spans:
                took_s = start.elapsed_time(end) / 1000 if self._cuda else end - start
                seconds[stage].append(float(took_s))
        return seconds
