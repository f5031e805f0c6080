"""An elastic run goes on in as many places as are free, divide its batch, and are within bounds."""

import io
import sys

import pytest

from scalejax.cli.main import main
from scalejax.launch import Launch, launch
from scalejax.launch.places import Elastic, Places

ROOM_FOR_EIGHT = Elastic(least=2, most=8, rejoin_seconds=10)


class Clock:
    """A clock that is set."""

    def __init__(self):
        self.now = 100.0

    def read(self):
        """The time."""
        return self.now


def divides(batch):
    """Whether a number of processes divides it."""
    return lambda count: batch % count == 0


def test_the_most_that_divide_the_batch_go_on_and_the_others_are_spare():
    """Three of eight are lost: of the five left four share a batch of 64. Two more are lost, and a
    spare place takes the part of one."""
    places = Places(ROOM_FOR_EIGHT, 8, divides(64))

    assert places.chosen() == (0, 1, 2, 3, 4, 5, 6, 7)
    places.lose([0, 2, 7])
    assert places.chosen() == (1, 3, 4, 5)
    places.lose([3])
    assert places.chosen() == (1, 4, 5, 6)
    places.lose([1])
    assert places.chosen() == (4, 5)


def test_a_place_comes_back_later_each_time():
    """After the stated time, then twice as long: a GPU that is broken does not hold the run up
    every minute. Up to 32 times, so that a machine that was mended is not lost for ever."""
    clock = Clock()
    places = Places(ROOM_FOR_EIGHT, 8, divides(840), clock.read)
    waited = []
    for _ in range(8):
        places.lose([3])
        assert places.chosen() == (0, 1, 2, 4, 5, 6, 7)
        waited.append(places.seconds_to_wait())
        clock.now += waited[-1]
        assert places.chosen() == tuple(range(8))

    assert waited == [10, 20, 40, 80, 160, 320, 320, 320]


def test_with_too_few_left_the_run_waits():
    """Fewer than the least, or than any number that can train; not for ever (Horovod's 3494)."""
    clock = Clock()
    places = Places(ROOM_FOR_EIGHT, 8, lambda count: count in (8, 4, 1), clock.read)
    places.lose(range(5))

    assert places.chosen() == ()
    clock.now += places.seconds_to_wait()
    assert places.chosen() == tuple(range(8))


def test_it_begins_in_fewer_places_than_there_are():
    """The others join when a place that was lost now would."""
    clock = Clock()
    places = Places(ROOM_FOR_EIGHT, 3, divides(840), clock.read)

    assert places.chosen() == (0, 1, 2)
    clock.now += 10
    assert places.chosen() == tuple(range(8))


def test_where_no_number_can_train_the_processes_say_why():
    """All are started, and refuse the run in their own words; nothing waits."""
    assert Places(ROOM_FOR_EIGHT, 8, lambda count: False).chosen() == tuple(range(8))


def test_a_run_never_begins_with_no_process(tmp_path):
    """Which would end at once, and well: it waits until the places are free in which it can."""
    job = Launch(
        command=(sys.executable, "-c", "import os; print(os.environ['SCALEJAX_PROCESSES'])"),
        processes=1,
        elastic=Elastic(least=1, most=2, rejoin_seconds=0.2),
        can_train=lambda count: count == 2,
        folder=tmp_path,
    )
    out = io.StringIO()

    assert launch(job, out) == 0
    assert "the next is in 0 s\n2\n" in out.getvalue()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--np=-4", "--elastic", "4"], "elastic='4' is refused: it must be MIN:MAX"),
        (["--np=-4", "--elastic", "1:3"], "those of --np between them, such as 2:4"),
        (["--np=-4", "--elastic", "0:4"], "elastic='0:4' is refused"),
        (["--np=-4", "--elastic", "3:4"], "at least two numbers of processes from MIN to MAX must"),
        (["--np=-3", "--elastic", "3:8"], "np=-3 is refused: 4 is the fewest from MIN=3 that"),
        (["--np=-4", "--copy-seconds", "3"], "copy_seconds=3 is refused: it needs --elastic"),
        (["--np=-4", "--elastic", "2:4", "--rejoin-seconds=-1"], "rejoin_seconds=-1"),
        (["--np=4", "--elastic", "2:8"], "and through SLURM MAX is --np, such as 2:4"),
    ],
)
def test_bounds_that_cannot_work_are_refused(tmp_path, capsys, flags, said):
    """Before anything is started, with the field and what is accepted."""
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "mlp"\n[data]\nname = "fashion_mnist"\nedition = "embedded"\n'
        '[batch]\nglobal_batch = 64\n[optimizer]\nname = "sgd"\n'
        "[schedule]\nbase_learning_rate = 0.1\n[train]\nepochs = 1\n"
    )

    assert main(["launch", str(file), "--folder", str(tmp_path / "run"), *flags]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
