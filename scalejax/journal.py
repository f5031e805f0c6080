"""The record of a run while it is made: to its file and to whoever listens.

A heartbeat besides, for whoever started the process and waits for a sign of life, and the clock
of the session, which says where its time goes.

Knows measurements and where they go; decides nothing.
"""

import time

from jax.experimental.multihost_utils import sync_global_devices

from scalejax.heartbeat import Heartbeat
from scalejax.processes import is_first
from scalejax.progress import Reporter
from scalejax.record import Measurement, MeasurementLog, RunFolder, RunRecord
from scalejax.run_clock import RunClock


class Journal:
    """The record, the reporter and the clock of a run; writes in the first process alone."""

    def __init__(
        self,
        files: RunFolder,
        reporter: Reporter,
        heartbeat: Heartbeat,
        clock: RunClock,
        *,
        after_step: int,
    ) -> None:
        """Open the record in `files`, with the lines of steps up to `after_step`."""
        self.files = files
        self.reporter = reporter
        self.heartbeat = heartbeat
        self.clock = clock
        self.earlier: tuple[Measurement, ...] = ()
        self._log = None
        self._zero = time.perf_counter()
        if is_first():
            self._log = MeasurementLog(files.measurements, after_step=after_step)
            self._zero -= self._log.elapsed_seconds
        sync_global_devices("the record is cut")
        if after_step:  # filtered as well: a shared disk may show the file as it was
            measurements = RunRecord.load(files.path).measurements
            self.earlier = tuple(m for m in measurements if m.step <= after_step)

    @property
    def elapsed_seconds(self) -> float:
        """Time since training began, over all the sessions of the run."""
        return time.perf_counter() - self._zero

    def write(self, measurement: Measurement) -> None:
        """Put down one line, and say it."""
        if self._log is not None:
            self._log.append(measurement)
        self.reporter.measured(measurement)

    def close(self) -> None:
        """End the record of this session."""
        self.reporter.end()
        if self._log is not None:
            self._log.close()
