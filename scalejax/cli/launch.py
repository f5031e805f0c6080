"""The command `launch`: starts the processes of one run here, through SLURM, or as a JobSet.

Imported without JAX; only the processes import it.
"""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    Overrides,
    RunFileCommand,
    flag,
    require_result_files,
    say,
)
from scalejax.cli.train import write_run
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.run import RunConfig, load_config, resolve
from scalejax.core import serialization
from scalejax.core.errors import ConfigError, ExitCode, ScalejaxError, refusal
from scalejax.core.folder import FileIn
from scalejax.core.process_group import GO_ON
from scalejax.core.serialization import JsonValue
from scalejax.data.facts import fitting_facts
from scalejax.launch import Launch, launch
from scalejax.launch.gpus import visible_gpus
from scalejax.launch.kubernetes import JobSetRun, manifest
from scalejax.launch.nodes import TASKS_PER_NODE, Nodes
from scalejax.launch.peers import require_stuck_seconds
from scalejax.launch.places import Elastic
from scalejax.launch.slurm import SlurmRun, follow, script, submit
from scalejax.launch.watchdog import STUCK_SECONDS
from scalejax.training.manifest import save_newest_copy
from scalejax.training.record import RunFolder, RunRecord

_ALL = ("run_file", "np", "target", "folder", "cpu_devices", "max_restarts", "stuck_seconds")
_RESUMING = ("resume", "start_over")
_ELASTIC = ("elastic", "copy_seconds", "rejoin_seconds")
_RESULTS = ("json", "csv")
_COPY_SECONDS = 10
_SECONDS_TO_BE_SEEN = 120
"""Time after which other machines see what was written to a file on a network file system."""
_FLAGS_OF = {
    "a run on this machine": (*_ALL, *_RESUMING, *_ELASTIC, "all_logs", *_RESULTS),
    "a run through SLURM": (
        *_ALL,
        *_RESULTS,
        *_RESUMING,
        *_ELASTIC,
        *("nodes", "gpus_per_node", "partition", "time", "slurm", "dry_run", "detach"),
    ),
    "--target jobset": (*_ALL, "gpus_per_node", "image", "volume", "namespace", "output"),
}
"""Flags by target; a flag of another target is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRun(RunFileCommand):
    """Train a run.toml in several processes, here or on a cluster.

    Here, when a process is lost the others are stopped, and with --max-restarts all resume from the
    latest checkpoint; through SLURM, the job requeues itself to do so. With --elastic the remaining
    processes continue. A process counts as lost within 10 s of its death, 20 s after it was
    stopped, and, under any launcher, 10 s after the limit of --stuck-seconds since the last
    progress of any process. SIGINT and SIGTERM end the run after the current update and a
    checkpoint; without a checkpoint 20 s later, if the update does not finish; within 5 s before
    training. A file that cannot be written ends it within 30 s, a checkpoint at the next one at the
    latest. Exit codes: 0 done; 2 refused, or a file cannot be written; 3 diverged; 4 stored data
    are damaged; 5 a process was lost; 75 the network or a store did not answer; 130, 143 stopped by
    a signal.
    """

    np: Annotated[int, flag("N")]
    """Number of processes: -4 for four on this machine, 4 for four through SLURM, one per GPU. With
    --target jobset the number of GPUs, or of pods if it requests no GPUs."""
    target: Literal["processes", "jobset"] = "processes"
    """Start processes, or write a JobSet for Kubernetes."""
    folder: Annotated[Path | None, flag("DIR")] = None
    """Folder of the run record, and of logs in processes/ or slurm/. By default runs/ and the name
    of the file. Its last part names the job."""
    resume: FlagCreatePairsOff[bool] = False
    """Resume from the newest checkpoint in the folder that verifies. A JobSet always does."""
    start_over: FlagCreatePairsOff[bool] = False
    """With --resume: if steps are recorded but no checkpoint verifies, begin at the first step
    instead of refusing; a restart does not do so again."""
    cpu_devices: Annotated[int | None, flag("N")] = None
    """Divide the CPU into N virtual devices for each process."""
    max_restarts: Annotated[int | None, flag("N")] = None
    """Number of restarts when a process is lost, or the time limit of the job is reached. By
    default 0; with --elastic 3, counting those in a row that made no new step. Through SLURM the
    job requeues itself up to this many times, by default never."""
    elastic: Annotated[str | None, flag("MIN:MAX")] = None
    """When processes are lost, continue in the remaining ones, at least MIN, from a copy of the
    state in memory; when places are free again, in at most MAX. The global batch and the schedule
    stay: as many train as divide the batch, the others are spare. Through SLURM MAX is --np: the
    job requests the nodes of MIN to MAX, and keeps the remaining ones (--no-kill); on several nodes
    it resumes from its newest checkpoint. If its first node is lost, the job is requeued, up to
    --max-restarts times (here 3 by default), and then cancelled."""
    copy_seconds: Annotated[int, flag("N")] = _COPY_SECONDS
    """With --elastic: least time between two copies of the state in /dev/shm, which need three
    times its size there; 50 times as long as the last one delayed training, if that is more. By
    default 10; 0 for none, so that the run resumes from its checkpoints, as on several nodes."""
    rejoin_seconds: Annotated[int, flag("N")] = 60
    """With --elastic: how long a place is not used after its process was lost; twice as long each
    further time, up to 32 times. Then the processes stop, after a copy or a checkpoint, and
    continue with it. By default 60."""
    stuck_seconds: Annotated[int, flag("N")] = 60
    """Time without progress after which the processes count as hung: they then write their stacks,
    name the one that the others wait for, and exit with 5. Ten times the slowest so far of an
    update, batch, evaluation or checkpoint if that is more; five times N for a checkpoint, and
    thirty while they start, compile, or do the first two of a kind. By default 60; 0 for no
    watch."""
    all_logs: FlagCreatePairsOff[bool] = False
    """Here: show the output of every process, each line prefixed by its number."""
    nodes: Annotated[int | None, flag("N")] = None
    """SLURM: number of nodes. By default the fewest that have the GPUs, or one."""
    gpus_per_node: Annotated[int | None, flag("N")] = None
    """SLURM and JobSet: GPUs per node. By default none are requested."""
    partition: Annotated[str | None, flag("NAME")] = None
    """SLURM: the partition. By default the cluster's."""
    time: Annotated[str | None, flag("TIME")] = None
    """SLURM: the time limit, in minutes or as in 2-12:00:00. The run saves and stops 120 s before
    it. By default the partition's."""
    slurm: Annotated[tuple[str, ...], flag("OPTION=VALUE ...")] = ()
    """SLURM: further options of sbatch, such as account=vision mem=64G; setup=LINE is run first."""
    dry_run: FlagCreatePairsOff[bool] = False
    """SLURM: print the script, and submit nothing."""
    detach: FlagCreatePairsOff[bool] = False
    """SLURM: do not wait for the job."""
    image: Annotated[str | None, flag("IMAGE")] = None
    """JobSet: the container image, with scalejax installed."""
    volume: Annotated[str | None, flag("CLAIM")] = None
    """JobSet: volume of the run record and checkpoints: the name of a PersistentVolumeClaim, or a
    path such as /mnt/shared that every node sees."""
    namespace: Annotated[str | None, flag("NAME")] = None
    """JobSet: the namespace. By default kubectl's."""
    output: Annotated[Path | None, flag("FILE.yaml")] = None
    """JobSet: write the manifest here. By default it is printed."""
    json: JsonFile = None
    """Write a summary of the run here as JSON, as train --json does."""
    csv: CsvFile = None
    """Write the same here as CSV."""

    def execute(self, overrides: Overrides) -> None:
        """Start the processes and exit with their code, or write the JobSet."""
        if not self.np:
            accepted = "it must be -4 for 4 processes here, or 4 for 4 on a cluster"
            raise ConfigError(refusal("np", self.np, accepted))
        config = load_config(self.run_file, overrides)
        facts = fitting_facts(config)  # refuses once, before anything is started
        changed = [f"--{name}={_as_toml(value)}" for name, value in overrides.items()]
        require_stuck_seconds(self.stuck_seconds)
        require_result_files(self.json, self.csv, self._run_folder, FileIn.names(RunFolder))
        if self.cpu_devices is not None:
            changed = ["--cpu-devices", str(self.cpu_devices), *changed]
        if self.stuck_seconds != STUCK_SECONDS:
            changed = ["--stuck-seconds", str(self.stuck_seconds), *changed]
        if self.target == "jobset":
            self._require_flags_of("--target jobset")
            self._write_jobset(changed)
        elif self.np > 0:
            self._require_flags_of("a run through SLURM")
            self._submit(self._command(changed), cache(partial(self._can_train, config, facts)))
        else:
            self._require_flags_of("a run on this machine")
            self._start(self._command(changed), cache(partial(self._can_train, config, facts)))

    @property
    def _run_folder(self) -> Path:
        return self.folder or Path("runs") / self.run_file.stem

    def _require_flags_of(self, what: str) -> None:
        """Refuse a flag of another target."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _FLAGS_OF[what] and value != field.default:
                others = [other for other, names in _FLAGS_OF.items() if field.name in names]
                accepted = f"it is for {' and '.join(others)}, and this is {what}"
                raise ConfigError(refusal(field.name, value, accepted))

    def _command(self, changed: list[str]) -> tuple[str, ...]:
        run_file, folder = self.run_file, self._run_folder
        if self.np > 0:  # a job may start in another working directory
            run_file, folder = run_file.absolute(), folder.absolute()
        command = [sys.executable, "-m", "scalejax", "train", str(run_file)]
        if self.np > 0 and self.elastic is not None:
            command = ["env", f"{GO_ON}={self._go_on}", *command[:-2], "launch", str(run_file)]
            command += [f"--np=-{self.np}", f"--elastic={self.elastic}"]
            command += [f"--rejoin-seconds={self.rejoin_seconds}"]
            command += [f"--copy-seconds={self.copy_seconds}"]
            if self.max_restarts is not None:
                command += [f"--max-restarts={self.max_restarts}"]
        command += ["--folder", str(folder), *changed]
        return (*command, "--resume") if self.resume else tuple(command)

    @property
    def _go_on(self) -> str:
        """The command that resumes the run; in a batch job, the one that the script was written
        with."""
        words = [
            *(word for word in sys.argv[1:] if word not in (*self._once, "--dry-run")),
            *(() if self.resume else ("--resume",)),
        ]
        return os.environ.get(GO_ON) or shlex.join(["scalejax", *words])

    @property
    def _once(self) -> tuple[str, ...]:
        """Flags of the first start: a restart continues from what that trained, or is refused."""
        return ("--start-over",) if self.start_over else ()

    def _can_train(self, config: RunConfig, facts: DatasetFacts, processes: int) -> bool:
        """Whether `processes` processes can train the run with its global batch."""
        places = int((self.elastic or "").rpartition(":")[2] or -self.np)
        is_here = self.np < 0 and TASKS_PER_NODE not in os.environ
        gpus = len(visible_gpus(os.environ)) if is_here else 0  # through SLURM each has one
        each = self.cpu_devices or max(1, gpus // places)
        try:
            resolve(config, processes * each, facts)
        except ScalejaxError:
            return False
        return True

    def _bounds(self, can_train: Callable[[int], bool]) -> Elastic | None:
        """The bounds of an elastic run; None if it is not one."""
        if self.elastic is None:
            for field in fields(self):
                value = getattr(self, field.name)
                if field.name in _ELASTIC and value != field.default:
                    raise ConfigError(refusal(field.name, value, "it needs --elastic MIN:MAX"))
            return None
        found = re.fullmatch(r"([1-9][0-9]{0,5}):([1-9][0-9]{0,5})", self.elastic)
        least, most = map(int, found.groups()) if found else (0, 0)
        count = abs(self.np)
        if not 1 <= least <= count <= most or (self.np > 0 and count < most):
            between = "with those of --np between them"
            accepted = (
                "it must be MIN:MAX, the fewest and the most processes, "
                f"{between if self.np < 0 else 'and through SLURM MAX is --np'}, "
                f"such as {max(1, count // 2)}:{count}"
            )
            raise ConfigError(refusal("elastic", self.elastic, accepted))
        counts = [count for count in range(least, most + 1) if can_train(count)]
        if len(counts) < 2:
            accepted = (
                "at least two numbers of processes from MIN to MAX must divide the global batch, "
                f"and fit the layout; here {counts[0] if counts else 'none'} does"
            )
            raise ConfigError(refusal("elastic", self.elastic, accepted))
        if counts[0] > count:
            accepted = (
                f"{counts[0]} is the fewest from MIN={least} that divide the global batch, and fit "
                "the layout"
            )
            raise ConfigError(refusal("np", self.np, f"{accepted}: begin with --np=-{counts[0]}"))
        return Elastic(
            least=least,
            most=most,
            rejoin_seconds=self.rejoin_seconds,
            copy_seconds=self.copy_seconds,
        )

    def _start(self, command: tuple[str, ...], can_train: Callable[[int], bool]) -> None:
        """Start the processes on this machine, and exit with their code."""
        folder = self._run_folder
        bounds = self._bounds(can_train)
        self._require_own_folder()
        run = RunFolder(path=folder)
        nodes = Nodes.of_this_job() if bounds else None
        if bounds and nodes:  # SLURM may have given fewer than the maximum
            bounds = replace(bounds, most=min(bounds.most, nodes.place_count), copy_seconds=0)

        def again() -> tuple[str, ...]:
            return () if self.resume or not run.holds_run else ("--resume",)

        job = Launch(
            command=command,
            once=self._once,
            again=again,
            processes=min(-self.np, bounds.most) if bounds else -self.np,
            elastic=bounds,
            nodes=nodes,
            can_train=can_train,
            save_copy=lambda copies: save_newest_copy(copies, run),
            folder=folder / "processes",
            environment={GO_ON: self._go_on}
            | ({} if self.cpu_devices is None else {"JAX_PLATFORMS": "cpu"}),
            most_restarts=self._most_restarts(3 if bounds else 0),
            # The processes watch each other too, and write their stacks first.
            stuck_seconds=(2 * self.stuck_seconds or math.inf)
            + (_SECONDS_TO_BE_SEEN if nodes else 0),
            shows_all=self.all_logs,
        )
        words = f"{job.processes} process{'es' if job.processes > 1 else ''}"
        print(f"starting {words} ...", file=sys.stderr)
        code = launch(job)
        if code in (ExitCode.DAMAGED, ExitCode.LOST, ExitCode.TRANSIENT) and run.holds_run:
            print(f"continue with: {job.environment[GO_ON]}", file=sys.stderr)
        self._write_result(run)
        raise SystemExit(code)

    def _write_result(self, run: RunFolder) -> None:
        """Write a summary of the run to --json and --csv, if given.

        A record that cannot be read, or a file that cannot be written, is reported, and does not
        change the exit code of the run.
        """
        if (self.json is None and self.csv is None) or not run.measurements.is_file():
            return
        try:
            write_run(RunRecord.load(run.path), self.json, self.csv)
        except ScalejaxError as error:
            say(f"error: how it went is not written: {error}", sys.stderr)

    def _most_restarts(self, default: int) -> int:
        return default if self.max_restarts is None else self.max_restarts

    def _require_own_folder(self) -> None:
        """Refuse a folder that the processes would refuse, before any of them has started."""
        run = RunFolder(path=self._run_folder)
        try:
            holds_run = run.holds_run
        except OSError as error:  # such as a name that is too long
            accepted = f"it cannot be read ({error.strerror})"
            raise ConfigError(refusal("folder", str(run.path), accepted)) from error
        if holds_run and not self.resume:
            run.refuse_second_run()
        if self.resume and not run.config.exists():
            run.refuse_no_run()

    def _submit(self, command: tuple[str, ...], can_train: Callable[[int], bool]) -> None:
        """Submit a job to SLURM, and wait for it unless detached."""
        folder = self._run_folder.absolute()
        bounds = self._bounds(can_train)
        self._require_own_folder()
        run = SlurmRun(
            command=command,
            once=self._once,
            run_marker=None if self.resume else RunFolder(path=folder).config,
            processes=self.np,
            least_processes=bounds and bounds.least,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            partition=self.partition,
            time=self.time,
            most_restarts=self._most_restarts(0),
            options=self.slurm,
            folder=folder / "slurm",
            name=folder.name,
        )
        if bounds and run.node_count > 1 and self.copy_seconds not in (0, _COPY_SECONDS):
            accepted = (
                "copies are in the memory of one machine; on several nodes a run resumes from its "
                "newest checkpoint (train.checkpoint_every_steps)"
            )
            raise ConfigError(refusal("copy_seconds", self.copy_seconds, accepted))
        for name in _RESULTS:
            if (self.dry_run or self.detach) and getattr(self, name) is not None:
                accepted = "nothing has been trained when --dry-run and --detach end"
                raise ConfigError(refusal(name, str(getattr(self, name)), accepted))
        if self.dry_run:
            print(script(run), end="")
            return
        job_id, log = submit(run)
        print(f"job {job_id} submitted; scancel {job_id} cancels it. Logs: {log.parent}")
        if self.detach:
            return
        try:
            code = follow(job_id, log)
        except KeyboardInterrupt:
            print(f"job {job_id} continues; scancel {job_id} cancels it.")
            raise
        self._write_result(RunFolder(path=folder))
        raise SystemExit(code)

    def _write_jobset(self, changed: list[str]) -> None:
        """Write or print the JobSet manifest."""
        for name, example in (("image", "ghcr.io/me/scalejax:1"), ("volume", "my-claim")):
            if getattr(self, name) is None:
                raise ConfigError(f"--target jobset needs --{name}, such as --{name} {example}.")
        serialization.require_writable("output", self.output)
        words = manifest(
            JobSetRun(
                name=re.sub(r"[^a-z0-9]+", "-", self._run_folder.name.lower()).strip("-"),
                run_toml=self.run_file.read_text(encoding="utf-8"),
                arguments=tuple(changed),
                slots=self.np,
                gpus_per_node=self.gpus_per_node,
                image=str(self.image),
                volume=str(self.volume),
                namespace=self.namespace,
                most_restarts=self._most_restarts(0),
            )
        )
        if self.output is None:
            print(words, end="")
            return
        serialization.save_text(words, self.output)
        print(f"wrote {self.output}; kubectl apply -f {self.output} starts it.")


def _as_toml(value: JsonValue) -> str:
    """`value` as TOML, as the flags of `train` parse it."""
    if isinstance(value, dict):
        fields = (f"{json.dumps(name)} = {_as_toml(inner)}" for name, inner in value.items())
        return f"{{ {', '.join(fields)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_toml, value))}]"
    return json.dumps(value)
