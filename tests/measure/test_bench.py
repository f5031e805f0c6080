"""What a bench plans, and what it makes of measured steps, against independent figures."""

import json
import math
import mmap
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench_cases import RUN, finished, planned, progress, result
from program_cases import program_of
from scipy import stats

from scalejax.cli.main import main
from scalejax.core import serialization
from scalejax.core.errors import ConfigError
from scalejax.measure.bench import BenchFolder, measured_runs, read_summaries, run_bench
from scalejax.measure.bench import run as bench_run
from scalejax.measure.bench.monitor import Monitor
from scalejax.measure.bench.results import kept_share, read_plan, read_result, scaling_table
from scalejax.measure.bench.statistics import median_interval, moving_average, speed
from scalejax.measure.bench.tables import ScalingTable, column_of

# --- parity with DLBS ---

# (milliseconds of each column, devices, scaling, speedup and efficiency as `bench_data.py` of
# dlcookbook-dlbs computes them before its clamp), by hand: throughput = batch * 1000 / ms,
# efficiency = int(10000 * t1 / tN) / 100, divided by N when scaling is strong.
DLBS = {
    "weak: cut off, not rounded": (
        [100.0, 103.0, 150.1],
        (1, 2, 4),
        "weak",
        [1.0, 2 * 100 / 103, 4 * 100 / 150.1],
        [100.0, 97.08, 66.62],  # 97.087..., 66.622...
    ),
    "strong: by the number of devices": (
        [90.0, 50.0, 30.0],
        (1, 2, 8),
        "strong",
        [1.0, 1.8, 3.0],
        [100.0, 90.0, 37.5],
    ),
    "weak: the first column is the baseline, whatever it is": (
        [80.0, 100.0],
        (4, 8),
        "weak",
        [1.0, 1.6],
        [100.0, 80.0],
    ),
    "strong: N counts all devices, also against 2": (
        [80.0, 40.0],
        (2, 4),
        "strong",
        [1.0, 2.0],
        [100.0, 50.0],
    ),
    "a cell that is missing stays so": (
        [100.0, None, 125.0],
        (1, 2, 4),
        "weak",
        [1.0, None, 3.2],
        [100.0, None, 80.0],
    ),
    "without the baseline nothing is known": (
        [None, 50.0],
        (1, 2),
        "weak",
        [None, None],
        [None, None],
    ),
    "superlinear: above 100 where DLBS would clamp": (
        [100.0, 45.0],
        (1, 2),
        "strong",
        [1.0, 100 / 45],
        [100.0, 111.11],
    ),
}


def table_of(times, counts, scaling, rates=(), baseline=0, clamps=False):
    """A table of one row."""
    return ScalingTable(
        scaling=scaling,
        device_counts=tuple(counts),
        labels=("",),
        milliseconds=(tuple(times),),
        samples_per_second=(tuple(rates or times),),
        baseline=baseline,
        clamps=clamps,
    )


@pytest.mark.parametrize("case", DLBS)
def test_tables_agree_with_dlbs(case):
    """Speedup from throughput, efficiency from times, cut off after two decimals."""
    times, counts, scaling, speedup, percent = DLBS[case]
    batches = [count if scaling == "weak" else 1 for count in counts]
    rates = [
        None if time is None else batch * 1000 / time
        for time, batch in zip(times, batches, strict=True)
    ]

    table = table_of(times, counts, scaling, rates)

    np.testing.assert_allclose(table.speedups[0], np.array(speedup, float), rtol=1e-6)
    np.testing.assert_array_equal(table.efficiencies[0], np.array(percent, float))


def test_clamp_is_that_of_bench_data():
    """100 at most, and only when asked for."""
    table = table_of((100.0, 45.0), (1, 2), "strong", clamps=True)

    assert table.efficiencies.tolist() == [[100.0, 100.0]]
    assert table.above_most == [("", 2, 111.11)]


def test_baseline_may_be_another_column():
    """What is asked for is 100, columns to its left are measured by it too."""
    times, rates = (100.0, 110.0, 121.0), (10.0, 20.0, 30.0)
    table = table_of(times, (1, 2, 4), "weak", rates, baseline=1)

    assert table.efficiencies.tolist() == [[110.0, 100.0, 90.9]]
    assert table.speedups.tolist() == [[0.5, 1.0, 1.5]]
    assert column_of(2, (1, 2, 4)) == 1
    with pytest.raises(ConfigError, match=r"baseline=3 is refused: .*: 1, 2, 4"):
        column_of(3, (1, 2, 4))


# --- parity with tf_cnn_benchmarks ---

# (batch, times in seconds, the line that `get_perf_timing` and `get_perf_timing_str` of
# `benchmark_cnn.py` print), by hand.
TF_CNN = {
    # mean time 7/3 s: 100 / (7/3) = 42.857; speeds 100, 50, 25: std 31.18 / sqrt(3) = 18.0;
    # median 50, deviations 50, 0, 25: 1.4826 * 25 = 37.065
    "three steps": (100, [1.0, 2.0, 4.0], "images/sec: 42.9 +/- 18.0 (jitter = 37.1)"),
    "steps alike": (64, [0.5] * 20, "images/sec: 128.0 +/- 0.0 (jitter = 0.0)"),
    # speeds 10 and 40: mean time 0.625 s, std 15 / sqrt(2) = 10.6, deviations of 15
    "two steps": (10, [1.0, 0.25], "images/sec: 16.0 +/- 10.6 (jitter = 22.2)"),
}


@pytest.mark.parametrize("case", TF_CNN)
def test_line_agrees_with_tf_cnn_benchmarks(case):
    """The batch over the mean time, not the mean of the speeds."""
    batch, times, line = TF_CNN[case]

    assert str(speed(batch, times)) == line


def test_triple_agrees_with_scipy_of_many_steps():
    """On random times, by another library's deviations."""
    times = np.random.default_rng(3).gamma(50, 0.002, 500)
    speeds = 256 / times

    found = speed(256, times.tolist())

    assert found.mean == pytest.approx(256 * 500 / times.sum())
    assert found.uncertainty == pytest.approx(stats.sem(speeds, ddof=0))
    assert found.jitter == pytest.approx(stats.median_abs_deviation(speeds) * 1.4826, rel=1e-9)


# --- intervals, averages ---


def test_interval_of_a_median_holds_it_as_often_as_it_says():
    """Of many samples with a known median about 95 % of the intervals hold it."""
    random = np.random.default_rng(0)
    held = 0
    for _ in range(24):
        low, high = median_interval([random.lognormal(0, 0.2, 60).tolist()])
        held += low <= 1.0 <= high

    # 24 draws of 0.95 hold at least 20 in 99.4 % of cases; blocks make it a little narrow.
    assert held >= 20


def test_interval_widens_where_rounds_differ():
    """Rounds on a machine that was busy in one of them say less than one round of as many steps."""
    random = np.random.default_rng(1)
    quiet, busy = (random.normal(mean, 0.01, 100).tolist() for mean in (1.0, 1.5))

    low, high = median_interval([quiet, busy])

    assert low < 1.02
    assert high > 1.48
    alone = median_interval([quiet])
    assert alone[1] - alone[0] < 0.02


def test_interval_of_equal_steps_is_a_point():
    """And is the same whenever it is asked for."""
    assert median_interval([[0.5] * 9, [0.5] * 9]) == (0.5, 0.5)


def test_moving_average_is_that_of_numpy():
    """Means of neighbours; none of fewer than the width."""
    values = np.random.default_rng(2).random(50)

    found = moving_average(values.tolist(), 10)

    assert found == pytest.approx(np.convolve(values, np.ones(10) / 10, "valid").tolist())
    assert moving_average([1.0, 2.0], 3) == []


# --- plans ---


def test_weak_scaling_keeps_the_batch_of_a_device_and_strong_that_of_all(tmp_path):
    """A global batch in the file is that of the fewest devices."""
    words = ("-V", 'scaling=["weak","strong"]', "-V", "devices=[2,4]")

    plan = planned(tmp_path, *words)

    batches = [(each.settings.devices, each.run.split.global_batch) for each in plan.benchmarks]
    assert batches == [(2, 8), (4, 16), (2, 8), (4, 8)]
    assert [each.run.split.per_device_batch for each in plan.benchmarks] == [4, 4, 4, 2]


def test_extensions_fork_and_templates_fill_in_fields_and_settings(tmp_path, monkeypatch):
    """Lists and regular expressions in conditions; templates in templates, and the environment."""
    monkeypatch.setenv("NAMED", "batch.per_device_batch")
    plan = planned(
        tmp_path,
        *("-P", "batch.per_device_batch=4", "-V", "devices=[1,2,4]"),
        *("-E", '{"condition": {"devices": [2, 4]}, "cases": [{}, {"processes": "${devices}"}]}'),
        *("-E", '{"condition": {"model.name": "ml."}, "parameters": {"steps": 7}}'),
        *("-P", 'warmup_steps="${${NAMED}}"'),
    )

    places = [(each.settings.devices, each.settings.processes) for each in plan.benchmarks]
    assert places == [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)]
    assert {(each.settings.steps, each.settings.warmup_steps) for each in plan.benchmarks} == {
        (7, 4)
    }


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("-P", "devices=0"), "devices=0 is refused: it must be at least 1"),
        (("-P", "devices=3", "-P", "processes=2"), "devices=3 is refused: .*processes=2"),
        (("-P", "steps=1.5"), "steps=1.5 is refused: it must be a whole number"),
        (("-P", "warmup_steps=0"), "warmup_steps=0 is refused"),
        (("-P", 'scaling="wek"'), "scaling='wek' is refused: did you mean 'weak'"),
        (("-P", 'batches="fake"'), "batches='fake' is refused"),
        (("-P", "model.hiden=[3]"), "model.hiden is not a field .did you mean 'hidden'"),
        (("-V", "devices=[1,1]"), "benchmarks 0 and 1.*they may not be equal"),
        (("-P", 'devices="${steps}"', "-P", 'steps="${devices}"'), "it names itself"),
        (("-E", '{"condition": {"devics": 1}, "parameters": {"steps": 3}}'), "mean 'devices'"),
        (("-E", '{"condition": {"devices": 9}, "parameters": {"steps": 3}}'), "none of the runs"),
        (("-V", "devices=[1,512]"), "train"),
        (("-P", "batch.ramp_epochs=[1]"), "batch.ramp_epochs"),
    ],
)
def test_what_cannot_be_timed_is_refused_by_its_field(tmp_path, words, refused):
    """Before a process is started."""
    with pytest.raises(ConfigError, match=refused):
        planned(tmp_path, *words)


def test_every_second_round_goes_backwards(tmp_path):
    """So that a machine that slows down all along is as slow for the first as for the last."""
    plan = planned(tmp_path, "-V", "devices=[1,2,4]", repeats=2)

    order = [(number, each.settings.devices) for number, each in plan.rounds]

    assert order == [(0, 1), (0, 2), (0, 4), (1, 4), (1, 2), (1, 1)]


# --- runs, with processes that only pretend ---


@pytest.fixture
def pretended(monkeypatch):
    """`launch` writes a result and counts; names in it fail, or are interrupted."""
    calls: list[str] = []
    codes: dict[str, int] = {}

    def launch(job, out, signals):
        path, name, repeat = job.command[4], job.command[5], int(job.command[6])
        calls.append(f"{name.split('-')[0]}/{repeat}")
        if code := codes.get(calls[-1], 0):
            print("error: it did not go", file=out)
            return code
        serialization.save(result(8, [0.1, 0.2]), BenchFolder(path=Path(path)).result(name, repeat))
        return 0

    monkeypatch.setattr(bench_run, "launch", launch)
    return calls, codes


def test_what_is_finished_is_skipped_unless_a_rerun_is_asked_for(tmp_path, pretended):
    """Also after more devices are asked for; a damaged result counts as none."""
    calls, _ = pretended
    folder = BenchFolder(path=tmp_path / "bench")
    run_bench(planned(tmp_path, "-V", "devices=[1,2]"), folder)
    wider = planned(tmp_path, "-V", "devices=[1,2,4]")
    folder.result(wider.benchmarks[1].name, 0).write_text("{")

    run_bench(wider, folder)

    assert calls == ["1/0", "2/0", "2/0", "4/0"]
    assert progress(folder) == {
        **{"status": "completed", "total": 3, "skipped": 1, "finished": 2, "failed": 0},
        **{"left": 0, "active": None, "problems": []},
    }
    run_bench(wider, folder, reruns=True)
    assert calls[4:] == ["1/0", "2/0", "4/0"]


def test_one_that_fails_leaves_the_others_their_turn(tmp_path, pretended):
    """Its later rounds are left out, and what it said is told."""
    calls, codes = pretended
    codes["2/0"] = 75
    folder = BenchFolder(path=tmp_path / "bench")

    problems = run_bench(planned(tmp_path, "-V", "devices=[1,2,4]", repeats=2), folder)

    assert calls == ["1/0", "2/0", "4/0", "4/1", "1/1"]
    assert len(problems) == 1
    assert re.search("devices=2: ended with exit code 75: error: it did not go", problems[0])
    assert progress(folder)["failed"] == 1


def test_interrupt_keeps_what_is_finished(tmp_path, pretended):
    """And the same command goes on behind it."""
    calls, codes = pretended
    codes["2/0"] = 130
    folder, plan = BenchFolder(path=tmp_path / "bench"), planned(tmp_path, "-V", "devices=[1,2]")

    with pytest.raises(KeyboardInterrupt):
        run_bench(plan, folder)

    assert progress(folder)["status"] == "interrupted"
    codes.clear()
    run_bench(plan, folder)
    assert calls == ["1/0", "2/0", "2/0"]


# --- tables, fits, commands ---


def test_table_has_a_row_for_what_differs_besides_devices(tmp_path):
    """Missing combinations are missing cells."""
    plan = planned(
        tmp_path,
        *("-V", "batch.per_device_batch=[8,16]", "-V", "devices=[1,2]"),
        *(
            "-E",
            '{"condition": {"devices": 2, "batch.per_device_batch": 16}, '
            '"parameters": {"devices": 4}}',
        ),
    )
    folder = finished(plan, tmp_path / "bench", {1: [0.1] * 3, 2: [0.125] * 3, 4: [0.2] * 3})

    table = scaling_table(read_summaries(plan, folder), "weak")

    assert table is not None
    assert table.device_counts == (1, 2, 4)
    assert table.labels == ("8 per device", "16 per device")
    assert table.milliseconds == ((100.0, 125.0, None), (100.0, None, 200.0))
    assert table.samples_per_second == ((80.0, 128.0, None), (160.0, None, 320.0))
    wanted = [[100.0, 80.0, np.nan], [100.0, np.nan, 50.0]]
    np.testing.assert_array_equal(table.efficiencies, wanted)


def test_times_of_other_devices_are_no_baseline(tmp_path, monkeypatch):
    """A folder that a machine with GPUs and one without share."""
    plan = planned(tmp_path, "-V", "devices=[1,2]", repeats=1)
    folder = finished(plan, tmp_path / "bench", {1: [0.1], 2: [0.05]})
    first = plan.benchmarks[0]
    measured = read_result(first, folder, 0)
    assert measured is not None
    of_gpu = replace(measured, platform="gpu", device_kind="NVIDIA H100")

    serialization.save(of_gpu, folder.result(first.name, 0))

    with pytest.raises(ConfigError, match="of NVIDIA H100 and of cpu"):
        read_summaries(plan, folder)
    monkeypatch.setattr(bench_run, "has_accelerator", lambda: False)
    assert bench_run._is_timed_here(measured)
    assert not bench_run._is_timed_here(of_gpu)


def test_what_is_kept_counts_against_the_baseline_in_one_process(tmp_path):
    """Relative to its devices, also in strong scaling; unknown where it was not measured."""
    words = ("-P", 'scaling="strong"', "-V", "devices=[2,4]")
    plan = planned(
        tmp_path,
        *words,
        *("-E", '{"condition": {"devices": 4}, "cases": [{}, {"processes": 4}]}'),
    )
    folder = finished(plan, tmp_path / "bench", {2: [0.08] * 3, 4: [0.05] * 3})
    summaries = read_summaries(plan, folder)

    assert [kept_share(each, summaries) for each in summaries] == pytest.approx([1.0, 0.8, 0.8])
    assert kept_share(summaries[0], summaries, 4) == pytest.approx(1.25)
    assert kept_share(summaries[2], summaries[2:], 2) is None


def test_statistic_is_median_or_mean(tmp_path):
    """One slow step moves the mean alone."""
    plan = planned(tmp_path)
    folder = finished(plan, tmp_path / "bench", {1: [0.1, 0.1, 0.4]})
    summaries = read_summaries(plan, folder)

    cells = {}
    for name in ("median", "mean"):
        table = scaling_table(summaries, "weak", statistic=name)
        assert table is not None
        cells[name] = table.milliseconds[0][0]

    assert cells == pytest.approx({"median": 100.0, "mean": 200.0})


def test_plan_is_read_back_from_its_folder(tmp_path):
    """As `scalejax report` and `calibrate --from` do."""
    plan = planned(tmp_path, "-V", "devices=[1,2]", repeats=2)
    folder = finished(plan, tmp_path / "bench", {1: [0.1], 2: [0.2]})

    found = read_plan(folder)

    assert found == plan
    with pytest.raises(ConfigError, match=r"devices=4 is refused: in 1 process, .* measured 1, 2"):
        measured_runs(read_summaries(found, folder), folder, [4])


@pytest.mark.parametrize("entry", [[], "job", {"name": 3}, {"name": "job", "fields": []}])
def test_a_damaged_plan_is_refused(tmp_path, entry):
    """By the file, whatever stands in place of a benchmark."""
    folder = finished(planned(tmp_path, "-V", "devices=[1]"), tmp_path / "bench", {1: [0.1]})
    written = json.loads(folder.plan.read_text())
    written["benchmarks"] = [entry]
    folder.plan.write_text(json.dumps(written))

    with pytest.raises(ConfigError, match="is not a plan of scalejax bench: an entry is damaged"):
        read_plan(folder)


def test_calibrate_refuses_what_is_not_measured(tmp_path, capsys):
    """By the field, and before anything is fitted."""
    plan = planned(tmp_path, "-V", "devices=[1,2]")
    folder = finished(plan, tmp_path / "bench", {1: [0.1], 2: [0.2]})
    folder.result(plan.benchmarks[0].name, 0).unlink()
    one, two = (str(folder.benchmark(each.name)) for each in plan.benchmarks)
    bench = str(folder.path)
    alone = finished(planned(tmp_path, "-V", "devices=[1]"), tmp_path / "alone", {1: [0.1]})
    serialization.save(program_of(devices=1), alone.program(plan.benchmarks[0].name))
    refused = {
        (str(alone.path),): "from='.*alone' is refused: a fit takes 2 to 5 .* leave 1 benchmark of",
        (bench,): "too few results for a fit, .* 1-.* has none that can be read",
        (bench, two): "comes alone",
        (bench, "--devices", "4"): "devices=4 is refused",
        (bench, "--devices", "1"): "devices=1 is refused: in 1 process, .* has measured 2",
        (one, two): "from=.* is refused: it has no finished round",
        (two, two, "--devices", "2"): "devices='2' is refused",
    }
    for words, sentence in refused.items():
        assert main(["calibrate", "--from", *words, "--output", str(tmp_path / "out")]) == 2
        assert re.search(sentence, " ".join(capsys.readouterr().err.split()))


def cli(*words: str) -> int:
    """The exit code of `scalejax bench`."""
    return main(["bench", *words])


def test_command_writes_a_plan_and_runs_nothing(tmp_path, capsys):
    """--devices and --processes are variables too; processes alone have a device each."""
    run, plan = tmp_path / "run.toml", tmp_path / "plan.json"
    run.write_text(RUN)

    assert cli(str(run), "--processes", "1,2", "--steps", "3", "--plan", str(plan)) == 0

    written = json.loads(plan.read_text())["benchmarks"]
    places = [(each["settings"]["devices"], each["settings"]["processes"]) for each in written]
    assert places == [(1, 1), (2, 2)]
    assert [each["global_batch"] for each in written] == [8, 16]
    assert "nothing was timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("--devices", "1,x"), "devices='1,x' is refused"),
        (("--devices", "1", "-V", "devices=[2]"), "--devices says it already"),
        (("--baseline", "8"), "baseline=8 is refused"),
        (("--repeats", "0"), "repeats=0 is refused"),
        (("--monitor", "-1"), "monitor=-1.0 is refused"),
        (("--monitor", "nan"), "monitor=nan is refused"),
        (("-V", "devices=1"), "-V devices=1 is refused"),
        (("--cluster", "nowhere"), "cluster"),
    ],
)
def test_command_refuses_by_field_with_exit_code_2(tmp_path, capsys, words, refused):
    """One line that names the field."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)

    assert cli(str(run), "--folder", str(tmp_path / "bench"), *words) == 2

    said = " ".join(capsys.readouterr().err.split())
    assert refused in said
    assert not (tmp_path / "bench").exists()


def test_report_prints_tables_within_80_columns_and_draws(tmp_path, capsys, monkeypatch):
    """What is above 100 % is not clamped, and is warned of; the page shows the same."""
    monkeypatch.setenv("COLUMNS", "80")
    plan = planned(tmp_path, "-V", "devices=[1,2,4,8]", repeats=2)
    steps = {1: [0.1] * 12, 2: [0.09] * 12, 4: [0.11] * 12, 8: [0.125] * 12}
    folder = finished(plan, tmp_path / "bench", steps)
    words = (str(tmp_path / "run.toml"), "--devices", "1,2,4,8", "--repeats", "2", "--report")

    assert cli(*words, "--folder", str(folder.path)) == 0

    said = capsys.readouterr().out
    assert max(len(line) for line in said.splitlines() if str(tmp_path) not in line) <= 80
    assert re.search(r"8 per device +100.00 +111.11 +90.90 +80.00", said)
    assert "111.11 % efficient" in said
    assert "images/sec: 80.0 +/- 0.0 (jitter = 0.0)" in said
    for name in ("scaling.png", "step_times.png", "usage.png"):
        assert (folder.path / name).read_bytes().startswith(b"\x89PNG")
    rows = json.loads(folder.results.read_text())["rows"]
    assert math.isclose(rows[1]["samples_per_second"], 16 / 0.09)
    page = tmp_path / "page.html"
    assert main(["report", str(folder.path), "--output", str(page)]) == 0
    assert "111.11" in page.read_text()


# --- monitor ---


def test_monitor_sees_what_this_process_takes():
    """CPU time that is burnt and memory that is held within show up in the samples."""
    held = []

    def burn() -> None:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            sum(range(20_000))

    monitor = Monitor(0.02, device_bytes=lambda: 7)
    with monitor.sampling():
        while not monitor.samples(0.0):  # on a busy machine its thread may begin late
            burn()
        held.append(mmap.mmap(-1, 2**24))  # of the system: what was freed before may be there yet
        held[0].write(bytes(2**24))
        burn()

    samples = monitor.samples(0.0)

    assert len(samples) >= 2
    assert samples[0].cpu_percent is None
    assert max(each.cpu_percent or 0 for each in samples) > 5
    assert samples[-1].rss_bytes - samples[0].rss_bytes > 2**23
    assert samples[-1].threads >= 2
    assert {each.device_bytes for each in samples} == {7}
    assert samples[0].pss_bytes is None or samples[0].pss_bytes <= samples[0].rss_bytes


def test_monitor_that_is_off_takes_no_samples():
    """A period of 0 starts no thread."""
    monitor = Monitor(0.0)
    with monitor.sampling():
        pass

    assert monitor.samples(0.0) == ()


def test_signal_that_a_benchmark_outlived_ends_the_bench_all_the_same(
    tmp_path, pretended, monkeypatch
):
    """`launch` takes it and passes it on; the benchmark may have been about to end."""
    calls, _ = pretended
    launch = bench_run.launch

    def signalled(job, out, signals):
        os.kill(os.getpid(), signal.SIGTERM)
        return launch(job, out, signals)

    monkeypatch.setattr(bench_run, "launch", signalled)
    folder = BenchFolder(path=tmp_path / "bench")

    with pytest.raises(KeyboardInterrupt):
        run_bench(planned(tmp_path, "-V", "devices=[1,2]"), folder)

    assert calls == ["1/0"]


def test_signal_between_benchmarks_ends_the_bench(tmp_path, pretended, monkeypatch):
    """While those that are finished are looked for, also of the last."""
    calls, _ = pretended
    folder, plan = BenchFolder(path=tmp_path / "bench"), planned(tmp_path, "-V", "devices=[1]")
    run_bench(plan, folder)
    read = bench_run.read_result

    def signalled(*words):
        os.kill(os.getpid(), signal.SIGINT)
        return read(*words)

    monkeypatch.setattr(bench_run, "read_result", signalled)
    with pytest.raises(KeyboardInterrupt):
        run_bench(plan, folder)

    assert calls == ["1/0"]
    assert progress(folder)["status"] == "interrupted"
