"""Runs the studies of a search: ordinary studies, whose result files every other command reads."""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from sdopt.config.composer import composer_of
from sdopt.config.models import own_functions
from sdopt.config.overrides import key_of, merge_overrides
from sdopt.config.parse import RunConfig
from sdopt.errors import UnavailableError, UsageError
from sdopt.gate.calibration import (
    calibration_file,
    calibration_of,
    fit_of,
    read_calibration,
    write_calibration,
)
from sdopt.gate.rule_checks import require_measured
from sdopt.launching import launch
from sdopt.pipelines.prompts import resolve_prompts
from sdopt.record.choices import as_override, quoted
from sdopt.record.files import read_error, read_result
from sdopt.record.records import StudyResult, VariantResult
from sdopt.search.config import SearchConfig
from sdopt.search.record import FINAL
from sdopt.search.space import BASELINE, Combination
from sdopt.study.fingerprint import NOT_FETCHED, inputs_of, of_model
from sdopt.study.resume import missing_of
from sdopt.variant import Variant

_OTHER_NOISE = 500_000
"""Added to the noise seed for each judged study; a search draws fewer images than that before it judges."""

CALIBRATE = "calibrate"
"""The folder of the study that measures how much images differ by chance."""

_DESIGN = ("study=explicit", "study.skip_conflicts=true")

_UNTRACKED = ("gate=none", "tracking=none", "protocol.programs_s=0")


@dataclass(frozen=True)
class Studies:
    """Makes and reads the studies of one search, below its folder; `given` are overrides for every study."""

    given: Sequence[str]
    config: SearchConfig
    config_dir: Path | None
    folder: Path

    def overrides(self, stage: str) -> list[str]:
        """Returns the overrides, without its variants, of the study in a folder: `screen-00`, `race-0`, `final`.

        `calibrate` measures how much the baseline's images differ by chance.
        """
        if stage == CALIBRATE:
            seen = [
                f"quality.{key}={self._seen}"
                for key in ("prompt_count", "floor_prompts")
            ]
            once = ["protocol=smoke", "protocol.rounds=3", *_UNTRACKED, *seen]
            of_stage = [*_DESIGN, f"study.name={CALIBRATE}", "study.edges=[]"]
            return [*merge_overrides(self.given, once), *of_stage]
        design = [*_DESIGN, f"study.name={quoted(self.config.title)}"]
        if self.config.objectives != [
            "latency"
        ]:  # else what is clearly slower cannot be the best
            design.insert(0, "protocol.give_up=null")
        if not stage.startswith(FINAL):
            of_stage = [
                *map(
                    as_override,
                    self.config.screen
                    if stage.startswith("screen")
                    else self.config.race,
                )
            ]
            return merge_overrides(
                self.given, ["protocol=default", *_UNTRACKED, *of_stage, *design]
            )
        return [*self.judged(merge_overrides(self.given, design)), *self._fresh(stage)]

    def judged(self, overrides: Sequence[str]) -> list[str]:
        """Returns overrides with the gate that judges: the one that was asked for, or the default one, calibrated."""
        gate = (
            []
            if any(key_of(override) == "gate" for override in self.given)
            else ["gate=default"]
        )
        fit = (
            [f"gate.calibration={quoted(str(self._calibration))}"]
            if self._calibration.is_file()
            else []
        )
        # The gate is first, because a choice of a gate replaces the keys that were set for another one.
        return [*gate, *overrides, *fit]

    def _fresh(self, stage: str) -> list[str]:
        """Returns overrides for prompts, noise and an order of rounds that the search has not used yet.

        A later judgement has the prompts of the first one and other noise.
        """
        number = 1 + int(stage.partition("-")[2] or 0)
        with composer_of(self.given, self.config_dir) as composer:
            workload, protocol = composer.current.workload, composer.current.protocol
        noise = (
            []
            if workload.latents
            else [f"workload.seed={(workload.seed + number * _OTHER_NOISE) % 2**53}"]
        )
        return [
            f"workload.prompt_start={workload.prompt_start + self._seen}",
            *noise,
            f"protocol.shuffle_seed={(protocol.shuffle_seed + number) % 2**53}",
        ]

    @cached_property
    def _seen(self) -> int:
        """How many prompts the search may see before it judges."""
        seen = 0
        for stage in ("screen", "race"):
            run, _ = self.composed(stage)
            counts = (run.workload.prompt_count, run.quality.prompt_count)
            seen = max(seen, *(count or 0 for count in counts))
        return seen

    def require_final(self, candidates: Sequence[Combination]) -> None:
        """Checks before anything is measured that the gate will be able to judge.

        Raises:
            UsageError: a rule cannot be judged, or too few prompts are left for it.
        """
        overrides = [
            *self.overrides(FINAL),
            _variants(candidates[: self.config.finalists]),
        ]
        with composer_of(overrides, self.config_dir) as composer:
            run = composer.current
            plan = run.study.plan(composer)
        require_measured(plan, run.gate, run.quality, run.model)
        prompts = run.quality.prompt_count or 0
        there = len(
            resolve_prompts(replace(run.workload, prompt_count=prompts or 1), run.model)
        )
        if run.gate.judges and there < prompts:
            first = run.workload.prompt_start
            raise UsageError(
                f"workload.prompts={run.workload.prompts}: the gate judges {prompts} prompts that the search has not "
                f"seen, but only {there} follow after the first {first}; name a file of at least {first + prompts}"
            )

    @property
    def calibration_images(self) -> int:
        """How many images of the baseline `calibrate` generates; 0 if the gate needs none, or a packaged file fits."""
        run, baseline = self.composed(FINAL)
        rules = chain.from_iterable(run.gate.rules.values())
        in_shares = any(rule.of_seeds or rule.deviations for rule in rules)
        if run.gate.calibration or not in_shares:
            return 0
        packaged = calibration_file(run.recorded)
        there = run.model.weights == "packaged" and packaged.is_file()
        if (
            there
            and fit_of(
                read_calibration(packaged),
                run.recorded,
                named=False,
                parts=inputs_of(baseline, of_model).get("parts", ""),
            ).calibration
            is not None
        ):
            return 0
        return 2 * self._seen

    def calibrate(
        self,
        say: Callable[[str], None],
        limit_s: float | None = None,
        within: tuple[float, float] | None = None,
    ) -> float:
        """Measures how much the baseline's images differ by chance, if the gate needs it and no packaged file fits.

        On the prompts and noise that the search may see, and not on those that the finalists are judged by. After
        `limit_s` seconds it ends, and another call goes on; returns about how many more it takes. `within` is as for
        `launch`.
        """
        if not (images := self.calibration_images):
            return 0.0
        say(
            f"{CALIBRATE}: how much {images} images of the baseline differ by chance, which tells how much an option "
            "may change them"
        )
        before = self._images_so_far()
        result = self.measure(CALIBRATE, [], limit_s=limit_s, within=within)
        if result.status == "interrupted":
            made = self._images_so_far()
            pace_s = (limit_s or 0.0) / max(1, made - before)
            return max(1, images - made) * pace_s
        write_calibration(calibration_of(result), self._calibration)
        return 0.0

    def _images_so_far(self) -> int:
        """Returns how many images a calibration of this call or of an earlier one has."""
        folder = self.folder / CALIBRATE
        if not (folder / "result.json").is_file():
            return 0
        return sum(
            len(variant.images or variant.kept_images)
            for variant in read_result(folder).variants
        )

    @property
    def _calibration(self) -> Path:
        return self.folder / "calibration.json"

    def measure(
        self,
        stage: str,
        candidates: Sequence[Combination],
        brief: bool = True,
        limit_s: float | None = None,
        within: tuple[float, float] | None = None,
    ) -> StudyResult:
        """Measures the candidates beside a baseline, or completes such a study; shows nothing of it if `brief`.

        After `limit_s` it ends with what is measured, and its status is `interrupted`. `within` is as for `launch`.

        Raises:
            UsageError: the study cannot run.
            UnavailableError: the study broke off.
            InterruptedStudy: the user pressed Ctrl-C.
        """
        folder, overrides = self.folder / stage, self.overrides(stage)
        overrides.append(_variants(candidates))
        deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        if (folder / "result.json").is_file():
            result = read_result(folder)
            judged = bool(result.judgements) or not result.config.gate.judges
            failed = result.baseline_variant.status.failure
            if (
                result.status == "finished"
                and not missing_of(result).variants
                and judged
                and not failed
            ):
                return result
            again = ["retry_failed=true"] if failed else []
            patches = [f"patch={function}" for function in own_functions(overrides)]
            argv = [f"resume={folder}", *again, *patches]
        else:
            argv = ["--config-dir", str(self.config_dir)] if self.config_dir else []
            argv += [*overrides, f"hydra.run.dir={quoted(str(folder))}"]
        launch(argv, brief=brief, deadline=deadline, within=within)
        if not (folder / "result.json").is_file():
            error = read_error(folder)
            raise UnavailableError(
                error.problems if error else f"{folder}: the study left no result"
            )
        result = read_result(folder)
        if (baseline := result.baseline_variant).status.failure:
            needs = "; every combination is added to it: give what it needs to run, as in precision=fp16"
            raise UnavailableError(
                f"{folder}: the baseline failed: {baseline.reason}{needs}"
            )
        self._require_same_files(folder, result)
        return result

    def _require_same_files(self, folder: Path, result: StudyResult) -> None:
        """Checks that variants are those of the same names in the other studies of the search, and have read the same.

        A repository may have moved meanwhile: that of the model, or that of one candidate's LoRA. A user may have
        edited the file of an option.

        Raises:
            UnavailableError: options, or the contents of some files, have changed.
        """
        for file in sorted(self.folder.glob("*/result.json")):
            if file.parent == folder:
                continue
            before = {row.name: row for row in read_result(file.parent).variants}
            for row in result.variants:
                earlier = before.get(row.name)
                changed = "" if earlier is None else _changed(row, earlier)
                if changed:
                    raise UnavailableError(
                        f"{folder}: {row.name}: {changed} in {file.parent.name}: they changed during the search; begin "
                        "another one with --again"
                    )

    def composed(self, stage: str) -> tuple[RunConfig, Variant]:
        """Returns the configuration of a study without its variants, and its baseline; see `overrides`."""
        with composer_of(self.overrides(stage), self.config_dir) as composer:
            return composer.current, composer.variant(BASELINE)


def _changed(row: VariantResult, earlier: VariantResult) -> str:
    """Returns in words what of a variant is not as it was in an earlier study; "" if nothing is."""
    now, was = row.config.options, earlier.config.options
    for axis in dict.fromkeys((*now, *was)):
        if now.get(axis) != was.get(axis):
            return f"the keys of {axis} are {now.get(axis)}, and were {was.get(axis)}"
    for what in _READ & row.inputs.keys() & earlier.inputs.keys():
        digests = row.inputs[what], earlier.inputs[what]
        if digests[0] != digests[1] and NOT_FETCHED not in digests:
            return f"the contents of its {what} are {digests[0]}, and were {digests[1]}"
    return ""


_READ = frozenset({"model", "parts", "options"})
"""What a variant is made of, by the names of its digests: prompts and noise are others in each stage."""


def _variants(candidates: Sequence[Combination]) -> str:
    """Returns the override that names the variants of a study: the baseline and the candidates."""
    named = {BASELINE: ()} | {
        candidate.name: candidate.overrides for candidate in candidates
    }
    # As Hydra's grammar takes the keys of a dictionary.
    keys = {name: re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", name) for name in named}
    listed = (
        f"{keys[name]}:[{','.join(map(quoted, overrides))}]"
        for name, overrides in named.items()
    )
    return f"study.variants={{{','.join(listed)}}}"
