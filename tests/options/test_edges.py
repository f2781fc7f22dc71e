"""Each bounded key of options at its edges: right images and evidence, or a conflict before anything is measured."""

from dataclasses import Field, dataclass, fields
from typing import Any, get_type_hints

import numpy as np
import pytest

from runners.keys import limits_of
from sdopt.errors import UsageError
from sdopt.options import dbcache, magcache, offload, quantization  # noqa: F401 (options that nothing else here imports)
from sdopt.options.base import Optimization
from tests.fixtures import CPU, Compose, Load
from tests.options.hosts import evidence, image


@dataclass(frozen=True)
class Ground:
    """An option, and the workload on which it takes effect."""

    choice: str
    axis: str
    workload: tuple[str, ...] = ()
    size: int = 32

    @property
    def words(self) -> tuple[str, ...]:
        return self.choice, *self.workload, f"workload.size={self.size}"


STEPS = ("workload.steps=4",)
GROUNDS = {
    "DeepCaching": Ground("caching=deepcache", "caching", STEPS),
    "FirstBlockCaching": Ground("caching=first_block", "caching", STEPS),
    "SpectralForecast": Ground("caching=spectrum", "caching", ("workload.steps=8",)),
    "PyramidAttention": Ground(
        "caching=pyramid_attention", "caching", ("workload.steps=6",)
    ),
    "GuidanceInterval": Ground(
        "caching=guidance_interval", "caching", ("workload.steps=6",)
    ),
    "MagCache": Ground(
        "caching=magcache", "caching", ("model=emoji_dit", "workload.steps=25"), size=64
    ),
    "DualBlockCache": Ground(
        "caching=dbcache",
        "caching",
        ("model=emoji_dit", "workload.steps=20", "caching.threshold=0.5"),
        size=64,
    ),
    "TaylorSeer": Ground("caching=taylorseer", "caching", ("workload.steps=8",)),
    "TokenMerging": Ground("caching=tome", "caching"),
    "PrecomputedEmbeddings": Ground(
        "memory=precomputed_embeddings", "memory.precomputed_embeddings"
    ),
    "VaeTiling": Ground("memory=vae_tiling", "memory.vae_tiling", size=136),
    "GroupOffload": Ground(
        "memory=group_offload",
        "memory.group_offload",
        ("memory.group_offload.offload_type=block_level",),
    ),
    "Sliced": Ground("attention=sliced", "attention"),
    "Loaded": Ground("lora=loaded", "lora"),
    "Fused": Ground("lora=fused", "lora"),
    "Distilled": Ground(
        "lora=lcm_emoji", "lora", (*STEPS, "scheduler=lcm", "workload.guidance_scale=1")
    ),
    "Hotswap": Ground("lora=hotswap", "lora"),
    "Sdnq": Ground("precision=int8_sdnq", "precision"),
}
"""By the class whose keys are tried."""

ELSEWHERE: dict[tuple[str, str], Any] = {
    ("Hotswap", "target_rank"): (
        1,
        64,
    ),  # the highest would take the whole memory, which PyTorch says
    ("VaeTiling", "tile_size"): (64, 72, 80, 96, 100, 128, 16384),
    ("Loaded", "scale"): (-100, 0, 100),
    ("Fused", "scale"): (-100, 0, 100),
    ("DualBlockCache", "first_blocks"): (1, 2, 7),  # of eight blocks
    ("DualBlockCache", "last_blocks"): (0, 1, 6),
    ("DualBlockCache", "threshold"): (0.5, 0.999),
    ("FirstBlockCaching", "threshold"): (
        10,
    ),  # with the lowest no step is skipped, which only images can show
}
"""Values that are tried instead of the edges."""


def keys_of(kind: type) -> list[Field[Any]]:
    """The keys of a class that are numbers within bounds."""
    return [
        each
        for each in fields(kind)
        if {"ge", "gt", "le", "lt"} & limits(kind, each).keys()
    ]


def limits(kind: type, key: Field[Any]) -> dict[str, Any]:
    return limits_of(get_type_hints(kind, include_extras=True)[key.name])


def edges(limits: Any, whole: bool) -> list[float]:
    """The lowest and the highest value, and one beside the lowest."""
    least = 1 if whole else 1e-6
    low = limits["ge"] if "ge" in limits else limits["gt"] + least
    high = limits["le"] if "le" in limits else limits["lt"] - least
    return [low, low + least, high]


def kinds(kind: type[Any] = Optimization) -> list[type[Any]]:
    """All classes of options of sdopt."""
    found = [kind] if kind.__module__.startswith("sdopt.") else []
    for child in kind.__subclasses__():
        found += kinds(child)
    return found


def cases() -> list[Any]:
    found = []
    by_name = {kind.__name__: kind for kind in kinds()}
    for name, ground in GROUNDS.items():
        kind = by_name[name]
        for key in keys_of(kind):
            whole = "int" in str(get_type_hints(kind)[key.name])
            for value in ELSEWHERE.get(
                (name, key.name), edges(limits(kind, key), whole)
            ):
                name_of_case = f"{ground.choice} {key.name}={value:g}"
                found.append(pytest.param(ground, key.name, value, id=name_of_case))
    return found


def test_every_bounded_key_is_tried() -> None:
    bounded = {kind.__name__ for kind in kinds() if keys_of(kind)}
    inherited = {
        kind.__name__
        for kind in kinds()
        if any(base.__name__ in GROUNDS for base in kind.__mro__)
    }
    assert bounded - inherited == set()


QUICK = ("tile_size=80", "tile_size=96", "interval=1000", "scale=0")


@pytest.mark.parametrize(
    ("ground", "key", "value"), [c for c in cases() if str(c.id).endswith(QUICK)]
)
def test_an_edge(
    ground: Ground, key: str, value: float, variant: Compose, session: Load
) -> None:
    draws_or_is_refused(ground, key, value, variant, session)


@pytest.mark.slow
@pytest.mark.parametrize(("ground", "key", "value"), cases())
def test_each_edge(
    ground: Ground, key: str, value: float, variant: Compose, session: Load
) -> None:
    draws_or_is_refused(ground, key, value, variant, session)


def draws_or_is_refused(
    ground: Ground, key: str, value: float, variant: Compose, session: Load
) -> None:
    words = (*ground.words, f"{ground.axis}.{key}={value}")
    try:
        refused = variant(*words).conflicts(CPU)
    except UsageError as error:
        refused = error.problems
    if refused:
        assert all(ground.axis.partition(".")[0] in each for each in refused), refused
        return
    host = session(*words)
    pictures = image(host)
    assert pictures.shape == (1, ground.size, ground.size, 3)
    assert np.isfinite(pictures).all()
    found = evidence(host, ground.axis)
    assert found.engaged, found.summary


@pytest.mark.parametrize("size", [8, 24, 72])
def test_a_size_that_no_network_halves_evenly(size: int, session: Load) -> None:
    pictures = image(session(f"workload.size={size}"))
    assert pictures.shape == (1, size, size, 3)
    assert np.isfinite(pictures).all()
