"""Names the stages of a pipeline call, and lets code run before and after each."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
from sdopt.pipelines.parts import denoiser_of, text_encoders_of

TEXT_ENCODER, VAE_ENCODER, DENOISER, VAE_DECODER = "text_encoder", "vae_encoder", "denoiser", "vae_decoder"

STAGES = (TEXT_ENCODER, VAE_ENCODER, DENOISER, VAE_DECODER)

Enter = Callable[[str], None]

Leave = Callable[[str, Any], None]


@contextmanager
def observed(pipe: "DiffusionPipeline", enter: Enter, leave: Leave) -> Iterator[None]:
    """Calls `enter(stage)` and `leave(stage, output)` around each stage of every call made within the block.

    Forward hooks go on the outermost module, so that a compiled graph is neither entered nor recompiled.
    """
    modules = [(encoder, TEXT_ENCODER) for encoder in text_encoders_of(pipe)] + [(denoiser_of(pipe), DENOISER)]
    with ExitStack() as stack:
        for module, stage in modules:
            before = module.register_forward_pre_hook(lambda *_, stage=stage: enter(stage))
            stack.callback(before.remove)
            after = module.register_forward_hook(lambda _module, _args, output, stage=stage: leave(stage, output))
            stack.callback(after.remove)
        stack.enter_context(_observed_method(pipe.vae, "encode", VAE_ENCODER, enter, leave))
        stack.enter_context(_observed_method(pipe.vae, "decode", VAE_DECODER, enter, leave))
        yield


@contextmanager
def _observed_method(vae: Any, name: str, stage: str, enter: Enter, leave: Leave) -> Iterator[None]:
    # Forward hooks do not run for other methods of the VAE.
    method, own = getattr(vae, name), vae.__dict__.get(name)

    def observed_method(*args: Any, **kwargs: Any) -> Any:
        enter(stage)
        output = method(*args, **kwargs)
        leave(stage, output)
        return output

    vae.__dict__[name] = observed_method
    try:
        yield
    finally:
        if own is None:
            del vae.__dict__[name]
        else:
            vae.__dict__[name] = own
