"""Which samples each gradient is of: as many as its part of an update."""

import pytest
from emulated_outcomes import CONFIG, emulated, run_of

from scalejax.config.emulation import EmulationConfig, SynchronousConfig
from scalejax.data.datasets import open_source
from scalejax.emulation.instructions import Rows
from scalejax.emulation.sampler import Samples


@pytest.mark.parametrize("backup_workers", [0, 2])
def test_gradients_that_count_are_of_a_global_batch_together(backup_workers: int):
    """24 samples to an update, of six workers or of the first four: 4 or 6 samples each."""
    algorithm = SynchronousConfig(gradient_sync="parameter_server", backup_workers=backup_workers)
    fields = {"batch.global_batch": 24}
    ran = emulated(EmulationConfig(algorithm=algorithm, workers=6), fields=fields)
    source = open_source(CONFIG.data, "train", seed=0)
    samples = Samples(run_of(fields), source)

    of = [each.rows for each in ran.log if each.rows is not None]

    assert {len(samples.take(rows)["inputs"]) for rows in of} == {24 // (6 - backup_workers)}
    assert {rows.worker for rows in of} == set(range(6))


def test_own_minibatches_of_a_worker_are_a_pass_over_its_part():
    """Five minibatches of 3 of the 16 or 17 examples of one of six workers, all different, and
    other than those of the others; the next pass takes the same part in another order."""
    source = open_source(CONFIG.data, "train", seed=0)
    samples = Samples(run_of({"batch.global_batch": 12}), source)

    def passed(worker: int, epoch: int) -> list[bytes]:
        places = range(5 * epoch, 5 * epoch + 5)
        several = [
            Rows(worker=worker, index=index, workers=6, way="own", sharing=4) for index in places
        ]
        return [example.tobytes() for rows in several for example in samples.take(rows)["inputs"]]

    first = [passed(worker, 0) for worker in range(6)]

    assert [len(set(each)) for each in first] == [15] * 6
    assert len(set().union(*first)) == 90
    assert passed(2, 1) != first[2]
    assert len(set(passed(2, 1)) | set(first[2])) <= 16
