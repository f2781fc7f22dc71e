"""What `sdopt serve` is configured by: how it turns requests into calls, and what of a study's configuration it reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import Field

from sdopt.config.groups import optimization_options
from sdopt.config.overrides import group_of, key_of
from sdopt.config.own import own_config
from sdopt.errors import UsageError
from sdopt.schema import Configured, UpTo1000, UpTo4096, UpTo10000

BATCHES = "workload.batch_size=[1,2,4,8]"
"""The batch sizes of a server where nobody names others."""

_SERVED = (
    *("model", "scheduler", "hardware", "task", "patch", "protocol.timeout_s"),
    *(
        f"workload.{key}"
        for key in ("batch_size", "guidance_scale", "negative_prompt", "size", "steps")
    ),
)
"""Sections, and keys of others, that a server reads beside the options."""


@dataclass(frozen=True)
class Serving(Configured):
    """How a server turns requests into calls of the pipeline, and what it refuses.

    A call takes the images that have waited longest and that one call can draw. Its batch sizes are those of
    `workload.batch_size`.
    """

    max_batch: UpTo4096 | None = None
    """Images of one call at most; null is the largest batch size of the workload."""
    window_ms: Annotated[float, Field(ge=0, le=60_000)] = 0.0
    """How long an image may wait for others to fill its batch, in milliseconds; with 0 a call takes what waits."""
    queue: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Images that may wait; a request with more is answered with 429."""
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds after which a request that still waits is answered with 504, and gets no image."""
    drain_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds that a server which is told to end waits for the call that runs."""
    max_n: UpTo4096 = 4
    """Images of one request at most."""
    body_kib: Annotated[int, Field(ge=1, le=1024)] = 64
    """Size of a request at most, in KiB."""
    mixed: bool = False
    """Whether requests may ask for other steps and guidance scales than those of the workload, which alone are measured
    and warm. They have calls of their own."""
    max_steps: UpTo10000 = 100
    """Steps that a request may ask for at most, with `mixed`."""
    host: str = "127.0.0.1"
    """Address to listen on. The default is reached from this machine alone; a server has no passwords."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port to listen on; 0 takes a free one."""
    engine: Literal["local", "ray"] = "local"
    """`local` serves from this process; `ray` from the Ray cluster at RAY_ADDRESS, through Ray's proxies."""
    replicas: UpTo1000 = 1
    """With `engine=ray`: copies of the model, each with a GPU if the device is one, and with a queue of its own."""
    most_replicas: UpTo1000 | None = None
    """With `engine=ray`: copies at most, which Ray adds and takes away by the load; null keeps `replicas`."""

    @property
    def policy(self) -> str:
        """Its name: `single`, `greedy`, or `window` with its length; and the most images of a call, where it names them."""
        if self.max_batch == 1 and not self.window_ms:
            return "single"
        name = f"window of {self.window_ms:g} ms" if self.window_ms else "greedy"
        return f"{name} up to {self.max_batch}" if self.max_batch else name

    def largest(self, batch_sizes: Sequence[int]) -> int:
        """Returns how many images one call takes at most."""
        return self.max_batch or max(batch_sizes)


def serving_config(overrides: Sequence[str]) -> tuple[Serving, list[str]]:
    """Returns `conf/serve.yaml` with the overrides of a command line applied, and the overrides of what is served.

    Raises:
        UsageError: an override names no key, is out of its range, or would have no effect on a server.
    """
    # `engine=ray` alone is what one types.
    own: list[str] = []
    others: list[str] = []
    for override in overrides:
        if override.startswith("engine="):
            own.append(f"serving.{override}")
        else:
            serves = group_of(key_of(override)) == "serving"
            (own if serves else others).append(override)
    serving = own_config("serve", Serving, own, "serving")
    problems = list(without_effect(others))
    if serving.engine == "local":
        given = [
            override
            for override in own
            if key_of(override) in ("serving.replicas", "serving.most_replicas")
        ]
        problems += [
            f"{override}: has no effect on one machine; choose engine=ray"
            for override in given
        ]
    elif serving.port == 0:
        problems.append("serving.port=0: Ray's proxies need a port that is named")
    if problems:
        raise UsageError(problems)
    return serving, others


def without_effect(overrides: Sequence[str], more: Sequence[str] = ()) -> Iterator[str]:
    """Yields a line for each override that nothing which is served depends on.

    Args:
        overrides: those of what is served.
        more: further sections and keys that a command reads.
    """
    known = {*_SERVED, *more, *(group for group, _ in optimization_options())}
    for override in overrides:
        key = key_of(override)
        section = group_of(key)
        if not (key in known or section in known or override.startswith("+")):
            keys = [
                name for name in (*_SERVED, *more) if name.startswith(f"{section}.")
            ]
            choice = f"; of this section it reads {', '.join(keys)}" if keys else ""
            meant = f"serving.{key.rpartition('.')[2]}"
            if meant in (f"serving.{field.name}" for field in fields(Serving)):
                choice = f"; did you mean {meant}?"
            yield f"{override}: has no effect on a server; leave it out{choice}"
