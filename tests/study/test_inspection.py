"""What is taken from processes after their rounds, and in which order."""

from types import SimpleNamespace
from typing import Any

import pytest

from sdopt.study import inspection


@pytest.mark.parametrize(("energy_s", "energy"), [(5.0, ["measure_energy"]), (0.0, [])])
def test_nothing_is_timed_after_the_profiler_has_looked(
    monkeypatch: pytest.MonkeyPatch, energy_s: float, energy: list[str]
) -> None:
    """It stays with a process on a GPU, whose launches are slower from then on."""
    asked: list[str] = []

    def ask(_self: Any, _group: Any, _phase: str, request: Any, *_: Any) -> list[Any]:
        asked.append(request.__name__)
        return []

    monkeypatch.setattr(inspection._Inspection, "_ask", ask)
    monkeypatch.setattr(inspection._Inspection, "_draw_images", lambda *_: asked.append("images"))
    monkeypatch.setattr(inspection, "living", lambda group: [])
    monkeypatch.setattr(inspection, "_inspected", lambda process: False)
    run: Any = SimpleNamespace(
        shapes=[0],
        sharing=SimpleNamespace(calls=1),
        operations={},
        progress=SimpleNamespace(advance=lambda *_: None),
        protocol=SimpleNamespace(stage_calls=1, energy_s=energy_s),
        quality=SimpleNamespace(metrics=False),
    )
    process: Any = SimpleNamespace(
        first=True,
        row=SimpleNamespace(is_control=False),
        variant=SimpleNamespace(applied=[], work="work"),
        measurement=SimpleNamespace(complete=False),
    )
    inspection.inspect_group(run, [process])
    assert asked == [*energy, "count_operations", "images", "time_stages", "prove"]
