"""The trials of a search: combinations that Optuna proposes, guided by earlier results, and stores.

The first trials are the options alone. Optuna learns of combinations that cannot run before anything is loaded.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import SQLAlchemyError

from sdopt.errors import UsageError, first_line
from sdopt.search.config import SearchConfig
from sdopt.search.findings import CandidateFinding
from sdopt.search.space import Combination, Point, Settings, Space

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, TrialState

_NAME, _STUDY, _WHY, _SPOILED = "variant", "study", "why", "spoiled"
_ENDED = "screening ended"

_MISSES = 20
"""Consecutive proposals without a new combination after which the rest of the space is tried in its own order."""

_LOOKED_AT = 500
"""Points to check for one that can run; composing each takes some hundredths of a second."""


@dataclass
class Trials:
    """The trials of one search; it is `exhausted` if the space has no more candidates."""

    study: optuna.Study
    space: Space
    config: SearchConfig
    exhausted: bool = False

    @classmethod
    def open(cls, name: str, space: Space, config: SearchConfig) -> Trials:
        """Returns the trials of the search `name`, also of earlier calls. Raises UsageError if there is no storage."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        storage = config.storage
        if storage.startswith("sqlite:///"):
            file = Path(storage.removeprefix("sqlite:///")).expanduser()
            file.absolute().parent.mkdir(parents=True, exist_ok=True)
            storage = f"sqlite:///{file}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                sampler = optuna.samplers.TPESampler(
                    seed=config.seed,
                    multivariate=True,
                    group=True,
                    constant_liar=True,
                    n_startup_trials=5,
                )
            study = optuna.create_study(
                storage=storage,
                study_name=name,
                load_if_exists=True,
                directions=["minimize"] * len(config.objectives),
                sampler=sampler,
            )
        except (SQLAlchemyError, ValueError, OSError) as error:
            raise UsageError(
                f"search.storage={config.storage}: {first_line(error)}"
            ) from error
        trials = cls(study, space, config)
        if not study.trials:
            for point in space.alone():
                study.enqueue_trial(point)
        return trials

    def propose(self, count: int, begun: str) -> list[Combination]:
        """Returns up to `count` untried candidates; fewer, or none, if the space has no more.

        Single options come first, in studies without combinations: their results show which combinations are worth the
        time. Options that compile come last, the first of them in a study of its own: its time shows how many more fit
        into the budget. `begun` is the study that will measure them, which is stored, so that a later call can
        complete it.
        """
        if alone := self._waiting():
            quick = [point for point in alone if not self.space.compiles(point)]
            new = len(alone) == len(
                [point for point in self.space.alone() if self.space.compiles(point)]
            )
            count = min(count, len(quick) or (1 if new else len(alone)))
        proposed: list[Combination] = []
        misses = 0
        while len(proposed) < count and (misses < _MISSES or self._enqueue_untried()):
            candidate = self._ask(begun)
            misses = misses + 1 if candidate is None else 0
            proposed += [] if candidate is None else [candidate]
        return proposed

    def unfinished(self) -> dict[str, list[Combination]]:
        """Returns the candidates that were proposed but have no result yet, by the study that measures them."""
        from optuna.trial import TrialState

        by_stage: dict[str, list[Combination]] = {}
        for trial in self._trials(TrialState.RUNNING):
            if _STUDY in trial.user_attrs:
                by_stage.setdefault(trial.user_attrs[_STUDY], []).append(
                    self._candidate(trial)
                )
            else:  # the process died after it asked Optuna and before it stored the study
                self.study.tell(trial.number, state=TrialState.FAIL)
        return by_stage

    def tell(self, findings: dict[str, CandidateFinding]) -> None:
        """Reports the findings on candidates to Optuna."""
        import optuna
        from optuna.trial import TrialState

        for trial in self._trials(TrialState.RUNNING):
            finding = findings.get(trial.user_attrs.get(_NAME, ""))
            if finding is None:
                continue
            live = optuna.trial.Trial(self.study, trial._trial_id)
            live.set_user_attr(_SPOILED, finding.spoiled)
            values = [
                finding.losses.get(objective) for objective in self.config.objectives
            ]
            if None in values:
                self.study.tell(trial.number, state=TrialState.FAIL)
                continue
            for name, share in finding.excess.items():
                live.set_constraint(name, share)
            beyond = any(share > 0 for share in finding.excess.values())
            live.set_constraint("ruled out", 1.0 if finding.out and not beyond else 0.0)
            self.study.tell(
                trial.number, [value for value in values if value is not None]
            )

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    @property
    def candidates(self) -> list[Combination]:
        """All proposed candidates that can run, in the order of proposal."""
        return [
            self._candidate(trial)
            for trial in self._trials()
            if _NAME in trial.user_attrs
        ]

    @property
    def spoiled(self) -> dict[str, Settings]:
        """The smallest combinations that were ruled out for their images, by name: none contains another."""
        if not self.config.skip_spoiled:
            return {}
        options = {
            trial.user_attrs[_NAME]: self.space.settings(self._point(trial))
            for trial in self._trials()
            if trial.user_attrs.get(_SPOILED)
        }
        smallest = {}
        for name, settings in options.items():
            if not any(other < settings for other in options.values()):
                smallest[name] = settings
        return smallest

    @property
    def ended(self) -> str:
        """Why screening ended; "" while it goes on."""
        return str(self.study.user_attrs.get(_ENDED, ""))

    @ended.setter
    def ended(self, why: str) -> None:
        self.study.set_user_attr(_ENDED, why)

    @property
    def untried(self) -> list[str]:
        """The options that were to be tried alone, and were not."""
        return [candidate.name for candidate in self.space.candidates(self._waiting())]

    @property
    def compiles_next(self) -> bool:
        """Whether what is proposed next compiles: of the options alone, those that compile come last."""
        waiting = self._waiting()
        return bool(waiting) and all(map(self.space.compiles, waiting))

    @property
    def stages(self) -> set[str]:
        """The studies that candidates were proposed for."""
        return {t.user_attrs[_STUDY] for t in self._trials() if _STUDY in t.user_attrs}

    @property
    def measured(self) -> set[str]:
        """The studies whose results were reported to Optuna."""
        from optuna.trial import TrialState

        return {trial.user_attrs[_STUDY] for trial in self._trials(TrialState.COMPLETE)}

    @property
    def started(self) -> datetime | None:
        """When the first candidate was proposed."""
        return min(
            (t.datetime_start for t in self._trials() if t.datetime_start), default=None
        )

    @property
    def conflicts(self) -> dict[str, str]:
        """Why combinations cannot run, by their overrides."""
        return {
            ", ".join(self.space.overrides(self._point(trial))): trial.user_attrs[_WHY]
            for trial in self._trials()
            if _WHY in trial.user_attrs
        }

    def _waiting(self) -> list[dict[str, Any]]:
        """Returns the points that are queued to be proposed before all others."""
        from optuna.trial import TrialState

        return [
            trial.system_attrs["fixed_params"]
            for trial in self._trials(TrialState.WAITING)
        ]

    def _ask(self, begun: str) -> Combination | None:
        """Asks Optuna once; returns None if its proposal cannot run, is the baseline, or was proposed before."""
        from optuna.trial import TrialState

        trial = self.study.ask()
        point: dict[str, Any] = {}
        for variable in self.space.variables:
            if self.space.applies(variable, point):
                point[variable.name] = trial.suggest_categorical(
                    variable.name, variable.values
                )
        if self._holds(point, self.spoiled.values()):
            self.study.tell(trial, state=TrialState.PRUNED)
            return None
        combinations = self._known(but=trial.number)
        asked = (
            None
            if tuple(self.space.overrides(point)) in combinations
            else self.space.candidate(point)
        )
        if isinstance(asked, Combination):
            trial.set_user_attr(_NAME, asked.name)
            trial.set_user_attr(_STUDY, begun)
            return asked
        if asked:
            trial.set_user_attr(_WHY, "; ".join(asked))
        # Optuna learns from a pruned trial, so combinations that cannot run are pruned; a failed one teaches nothing.
        self.study.tell(trial, state=TrialState.PRUNED if asked else TrialState.FAIL)
        return None

    def _holds(self, point: Point, spoiled: Iterable[Settings]) -> bool:
        """Returns whether a part of a point was ruled out for its images, and the rest cannot repair them."""
        settings = self.space.settings(point)
        return any(self.space.inherits(settings, part) for part in spoiled)

    def _known(self, but: int = -1) -> set[tuple[str, ...]]:
        """Returns the overrides of every proposed point, and those of the baseline."""
        from optuna.trial import TrialState

        combinations: set[tuple[str, ...]] = {()}
        for trial in self._trials():
            if trial.number != but and trial.state is not TrialState.WAITING:
                combinations.add(tuple(self.space.overrides(self._point(trial))))
        return combinations

    def more(self) -> bool:
        """Returns whether there is a combination to try that was not proposed."""
        return bool(self._waiting()) or self._untried_point() is not None

    def _enqueue_untried(self) -> bool:
        """Queues the first point of the space that is new and can run; returns whether there is one."""
        point = self._untried_point()
        if point is not None:
            self.study.enqueue_trial(point)
        return point is not None

    def _untried_point(self) -> dict[str, Any] | None:
        """Returns the first point of the space that is new and can run."""
        combinations = self._known()
        spoiled = list(self.spoiled.values())
        untried = (
            point for point in self.space.points() if not self._holds(point, spoiled)
        )
        new = (
            point
            for point in untried
            if tuple(self.space.overrides(point)) not in combinations
        )
        for point in islice(new, _LOOKED_AT):
            if self.space.candidates([point]):
                return point
        return None

    def _candidate(self, trial: FrozenTrial) -> Combination:
        return Combination(
            trial.user_attrs[_NAME], tuple(self.space.overrides(self._point(trial)))
        )

    def _point(self, trial: FrozenTrial) -> dict[str, Any]:
        names = [
            variable.name
            for variable in self.space.variables
            if variable.name in trial.params
        ]
        return {name: trial.params[name] for name in names}
