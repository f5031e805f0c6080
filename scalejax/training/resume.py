"""Which checkpoint a run resumes from: the newest that verifies, with its record and its config.

The first process decides, from what it reads in the folder that all processes see. Knows manifests,
records and configs; no arrays.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalejax.config.grid import fields_of
from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError, Damaged
from scalejax.core.serialization import JsonValue, load, plain
from scalejax.core.units import counted
from scalejax.training.checkpoint import Checkpoints, Found
from scalejax.training.data_fingerprints import UsedFiles
from scalejax.training.manifest import (
    Manifest,
    RunAtStep,
    StoppingState,
    digest,
    newest_file,
)
from scalejax.training.record import RecordPosition, RunFolder, has_steps
from scalejax.training.run_folder import changeable_fields, resolved_config


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What is the same at every checkpoint of a run."""

    run: ResolvedRun
    """The run."""
    config: dict[str, str]
    """Fields of its config, each as JSON."""
    data: str
    """SHA-256 of the facts of its data, and of the fingerprints of its files."""

    @classmethod
    def of(cls, run: ResolvedRun, files: RunFolder) -> "RunIdentity":
        """The identity of `run`, with the data files that its folder names.

        Raises:
            ConfigError: if the list of its data files is damaged.
        """
        used = plain(load(UsedFiles, files.data_files)) if files.data_files.is_file() else None
        return cls(
            run=run,
            config={
                name: json.dumps(value)
                for name, value in sorted(fields_of(resolved_config(run)).items())
            },
            data=digest([_as_ever(plain(run.dataset)), _as_ever(used)]),
        )

    def at(self, step: int, record: RecordPosition, stopping: StoppingState | None) -> RunAtStep:
        """What a manifest says about the run after `step` updates."""
        epoch, global_batch = self._position(step)
        return RunAtStep(
            config=self.config,
            data=self.data,
            epoch=epoch,
            global_batch=global_batch,
            record=record,
            stopping=stopping,
        )

    def require_same(self, step: int, saved: RunAtStep, files: RunFolder) -> None:
        """Refuse a checkpoint of another config, or of other data.

        Raises:
            ConfigError: naming the fields that differ.
        """
        changeable = changeable_fields(self.run)
        names = {*self.config, *saved.config}
        changed = [
            f"{name}={self.config.get(name, 'absent')} (was {saved.config.get(name, 'absent')})"
            for name in sorted(names - changeable)
            if self.config.get(name) != saved.config.get(name)
            and ((name in self.config and name in saved.config) or _is_of_a_table(name, names))
        ]
        where = f"{files.path / 'checkpoints' / str(step)}"
        if changed:
            raise ConfigError(
                f"{where} was made with a config other than that of {files.config.name}: "
                f"{', '.join(changed)}. Bring that file back as it was, "
                "or begin a new run in another folder."
            )
        if saved.data != self.data:
            raise ConfigError(
                f"{where} was made with other data than {files.facts.name} and "
                f"{files.data_files.name} say now. Bring the files back as they were, "
                "or begin a new run in another folder."
            )
        epoch, global_batch = self._position(step)
        if (saved.epoch, saved.global_batch) != (epoch, global_batch):
            raise ConfigError(
                f"{where} was made after {saved.epoch:g} epochs, before a batch of "
                f"{saved.global_batch}: it must be {epoch:g} and {global_batch} in this run, after "
                f"{counted(step, 'update')}. Begin a new run in another folder."
            )

    def _position(self, step: int) -> tuple[float, int]:
        return self.run.epoch_of(step), self.run.phase_of(step).split.global_batch


def _as_ever(fields: JsonValue) -> JsonValue:
    """The description of data without fields that are empty because there are no validation data,
    which manifests of earlier versions do not have."""
    if not isinstance(fields, dict):
        return fields
    added = ("validation", "validation_examples")
    return {name: value for name, value in fields.items() if value or name not in added}


def _is_of_a_table(name: str, names: set[str]) -> bool:
    """Whether a field is in a table that may be absent, or is such a table: any other field that
    only one config has was added or removed in another version."""
    parts = name.split(".")
    parents = {".".join(parts[:count]) for count in range(1, len(parts))}
    return bool(parents & names) or any(other.startswith(f"{name}.") for other in names)


def checkpoint_to_resume_from(
    checkpoints: Checkpoints,
    runs: Sequence[tuple[RunIdentity, RunFolder]],
    *,
    say: Callable[[str], None],
    is_resumed: bool = True,
    starts_over: bool = False,
    copies: Checkpoints | None = None,
) -> tuple[Manifest | None, Checkpoints]:
    """The manifest of the newest checkpoint that verifies (None if the runs begin at step 0), and
    where it is: in memory if `copies` hold one at least as new, else on disk. Every process must
    call it.

    Args:
        checkpoints: of the runs.
        runs: the run, or those that one program trains together, with the folder of each.
        say: called with each checkpoint that is passed over, and why.
        is_resumed: whether the runs are resumed; if not, the folder must hold no checkpoint.
        starts_over: whether they begin at step 0 if steps are recorded but no checkpoint verifies.
        copies: copies of the state in memory, which are checked first; None if there are none.

    Raises:
        Damaged: if no checkpoint verifies, but steps are recorded.
        ConfigError: if the newest was made with another config or other data, or if the folder
            holds checkpoints and the runs are not resumed.
    """

    def objection(manifest: Manifest) -> str | None:
        if len(manifest.runs) != len(runs):
            return f"its manifest is of {counted(len(manifest.runs), 'run')}, not {len(runs)}"
        for saved, (_, files) in zip(manifest.runs, runs, strict=True):
            saved.record.part_of(files.measurements)
            needed = saved.stopping and saved.stopping.restored_step
            if needed and needed != manifest.step and (found := checkpoints.difference(needed)):
                return f"it needs that of step {needed}, its best epoch: {found}"
        for saved, (identity, files) in zip(manifest.runs, runs, strict=True):
            identity.require_same(manifest.step, saved, files)
        return None

    copied = copies.newest_sound(objection) if copies else None
    if copies and copied:
        for step, reason in copied.passed_over.items():
            say(f"Note: the copy of step {step} in memory is passed over: {reason}.")
        if copied.step and copied.step >= (checkpoints.latest_step or 0):
            return copies.manifest(copied.step), copies  # nothing is read from the disk
    found = checkpoints.newest_sound(objection)
    folder = checkpoints.folder
    if not is_resumed and found.has_folders:
        raise ConfigError(
            f"{folder} holds checkpoints of a run that is no longer here: give another folder, "
            "or delete that one."
        )
    for step, reason in found.passed_over.items():
        say(f"Note: checkpoint {step} is passed over: {reason}.")
    if copies and copied and copied.step > found.step:
        return copies.manifest(copied.step), copies
    if found.step:
        # Each process reads the manifest itself: one that sees another folder is noticed.
        return checkpoints.manifest(found.step), checkpoints
    is_recorded = any(has_steps(files.measurements) for _, files in runs)
    was_none_finished = found.newest_step == 0
    is_new = found.newest_step is None and not is_recorded and not found.has_folders
    if is_resumed and not (was_none_finished or is_new or starts_over):
        raise Damaged(
            f"steps are recorded in {runs[0][1].path}, and no checkpoint in {folder} verifies"
            f"{_why(found, newest_file(folder).name)}. Bring them back, or use --start-over to "
            "train the run from its first step."
        )
    if starts_over and (is_recorded or found.passed_over):
        say("Note: no checkpoint verifies: the run starts over.")
    return None, checkpoints


def _why(found: Found, name: str) -> str:
    """What is known about a folder in which no checkpoint verifies, in brackets."""
    said = [f"{step}: {reason}" for step, reason in found.passed_over.items()]
    if found.newest_step is None:
        said.append(f"there is no {name}, which earlier versions of scalejax did not write")
    return f" ({'; '.join(said)})" if said else ""
