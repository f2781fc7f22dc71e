"""What a search may judge: figures that were shown once stay shown, however often it is called again."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sdopt.record.records import Status
from sdopt.record.verdicts import Verdict
from sdopt.search.judgements import Judgements
from sdopt.statistics.scale import Speed


def judged(
    speed: Speed,
    pays: bool = False,
    decision: Verdict = Verdict.PASS,
    disturbance: str = "",
) -> Any:
    return SimpleNamespace(
        pays=pays,
        decision=decision,
        speed=speed,
        status=Status.OK,
        disturbance=disturbance,
    )


def judgements(**rows: Any) -> Judgements:
    """Those of candidates, each of which was measured as faster and is not ruled out."""
    finding: Any = SimpleNamespace(out="", losses={"latency": -0.4, "memory": 0.1})
    return Judgements(rows=rows, findings=dict.fromkeys(rows, finding))


def test_only_what_ranks_before_a_shown_gain_is_judged_again() -> None:
    earlier = judgements(
        shown=judged(Speed.FASTER, pays=True),
        slower=judged(Speed.SLOWER),
        beside_others=judged(Speed.SLOWER, disturbance="by others"),
        refused=judged(Speed.FASTER, decision=Verdict.FAIL),
        close=judged(Speed.CLOSE),
    )
    ranked = ["slower", "beside_others", "close", "refused", "new", "shown", "behind"]
    assert earlier.open_among(ranked) == ["beside_others", "close", "new"]
    assert earlier.open_among(["shown", "new", "close"]) == []
    assert earlier.undecided == ["beside_others", "close"]
    assert replace(earlier, wanted="memory").undecided == []


def test_without_a_shown_gain_all_that_did_not_fail_are_open() -> None:
    earlier = judgements(slower=judged(Speed.SLOWER))
    assert earlier.open_among(["new", "slower", "another"]) == ["new", "another"]
    assert Judgements().open_among(["new"]) == ["new"]
