"""What the doctor says of machines that are not well, and that it names the fix."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from scalejax.core.errors import ConfigError
from scalejax.core.process_group import Place
from scalejax.core.units import GIB, MIB
from scalejax.hardware import Chip, load_cluster
from scalejax.measure.doctor import Finding, devices, examination, examine, is_any_bad
from scalejax.measure.doctor.devices import (
    Devices,
    MeasuredCollective,
    Rates,
    _rate_type,
    chip_when_busy,
    detected_chip,
    device_findings,
    no_devices,
    rate_findings,
)
from scalejax.measure.doctor.examination import together
from scalejax.measure.doctor.host import Host, host_findings
from scalejax.measure.doctor.network import (
    ClockOffset,
    Network,
    clock_finding,
    clock_offsets,
    network_findings,
)
from scalejax.measure.doctor.storage import Storage, file_system_of, storage_findings
from scalejax.measure.doctor.variables import Surroundings, variable_findings
from scalejax.measure.doctor.versions import Versions, version_findings
from scalejax.simulator.program import DeviceGroup

ROOT = Path(__file__).parents[2]
CODE = "import sys; from scalejax.cli.main import main; sys.exit(main())"

WELL = Host(
    cores=8,
    allowed_cores=8,
    quota_cores=None,
    load=0.5,
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    limit_bytes=None,
    used_of_limit_bytes=None,
    shared_memory_bytes=32 * GIB,
    shared_memory_free_bytes=32 * GIB,
    open_files=65536,
    most_open_files=65536,
    huge_pages="madvise",
)
DISK = Storage(
    role="run folder",
    file_system="ext4",
    free_bytes=500 * GIB,
    size_bytes=1000 * GIB,
    write_bytes_per_second=1e9,
    sync_seconds=1e-3,
)
VERSIONS = Versions(
    python="3.11.7",
    installed={
        "jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8", "optax": "0.2.8",
        "orbax-checkpoint": "0.12.8", "grain": "0.2.18", "numpy": "2.4.6",
        "jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2",
    },
    required={"python": ">=3.11", "jax": "<0.14,>=0.10.2", "jaxlib": "<=0.10.2,>=0.10.1"},
    driver="580.65.06",
)  # fmt: skip
H100 = load_cluster("dgx-h100")
EIGHT = Devices(
    platform="gpu",
    kind="NVIDIA H100 80GB HBM3",
    count=8,
    local_count=8,
    processes=1,
    memory_bytes=int(0.75 * 84_940_000_000),
    driver_gpus=8,
)


def fix_of(finding: Finding) -> str:
    """What to do, where there is something to do."""
    assert finding.fix is not None
    return finding.fix


def name_of(chip: Chip | None) -> str:
    """Of a chip that is known."""
    assert chip is not None
    return chip.name


def troubled(findings):
    """Those that are not as they should be, by name."""
    return {each.name: each for each in findings if each.verdict != "ok"}


def test_a_machine_that_is_well_has_no_fixes():
    """None of the checks cries wolf."""
    findings = [
        *host_findings(WELL),
        *storage_findings(DISK),
        *version_findings(VERSIONS),
        *network_findings(
            Network(host_name="a", address="10.0.0.1", loopback_problem=None), place=None
        ),
        *variable_findings({"PATH": "/bin", "LD_LIBRARY_PATH": "/lib"}, around()),
        *device_findings(EIGHT, H100),
    ]

    assert not troubled(findings)
    assert not is_any_bad(findings)


def test_what_is_not_well_has_a_fix_and_nothing_else_does():
    """So that none is forgotten."""
    with pytest.raises(ConfigError, match="fix=None is refused"):
        Finding(topic="host", name="load", value="9", verdict="bad")


@pytest.mark.parametrize(
    ("change", "name", "verdict", "fix"),
    [
        (
            {"shared_memory_bytes": 64 * MIB, "shared_memory_free_bytes": 64 * MIB},
            "/dev/shm",
            "bad",
            "--shm-size",
        ),
        ({"shared_memory_free_bytes": 300 * MIB}, "/dev/shm", "warn", "emptyDir"),
        ({"open_files": 256}, "open files", "bad", "ulimit -n 65536"),
        ({"open_files": 1024, "most_open_files": 2048}, "open files", "warn", "ulimit -n 2048"),
        ({"quota_cores": 1.5}, "cores", "warn", "input.workers at 1"),
        ({"quota_cores": 0.5}, "cores", "bad", "--cpus"),
        ({"load": 20.0}, "load", "warn", "other programs"),
        ({"available_bytes": GIB}, "free memory", "warn", "end other programs"),
        (
            {"limit_bytes": 4 * GIB, "used_of_limit_bytes": 4 * GIB - 100 * MIB},
            "free memory",
            "bad",
            "--memory",
        ),
        ({"huge_pages": "never"}, "huge pages", "warn", "madvise"),
    ],
)
def test_hosts_that_are_not_well(change, name, verdict, fix):
    """One reading is changed, and one finding says so."""
    (finding,) = troubled(host_findings(replace(WELL, **change))).values()

    assert (finding.name, finding.verdict) == (name, verdict)
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("change", "name", "verdict"),
    [
        ({"free_bytes": GIB // 2}, "run folder: free", "bad"),
        ({"free_bytes": 5 * GIB}, "run folder: free", "warn"),
        ({"write_bytes_per_second": 5e6}, "run folder: writing", "bad"),
        ({"sync_seconds": 0.2}, "run folder: fsync", "warn"),
        ({"file_system": "tmpfs"}, "run folder: kind", "warn"),
        ({"problem": "it is read-only"}, "run folder: writing", "bad"),
        ({"role": "cache folder", "file_system": "nfs4"}, "cache folder: kind", "warn"),
    ],
)
def test_disks_that_are_not_well(change, name, verdict):
    """One finding for each fault of the storage, with its verdict."""
    (finding,) = troubled(storage_findings(replace(DISK, **change))).values()

    assert (finding.name, finding.verdict) == (name, verdict)


def test_a_run_on_several_machines_needs_a_folder_that_all_see():
    """A local disk will not do there; a network file system will."""
    assert troubled(storage_findings(DISK, hosts=2))["run folder: kind"].verdict == "bad"
    assert not troubled(storage_findings(replace(DISK, file_system="nfs4"), hosts=2))


def test_the_file_system_of_a_folder_is_that_of_its_nearest_mount():
    """The later of two at one place."""
    mounts = "a / ext4 rw 0 0\nb /data nfs4 rw 0 0\nc /data/my\\040disk xfs rw\nd /dev/shm tmpfs rw"

    assert file_system_of(Path("/data/runs"), mounts) == "nfs4"
    assert file_system_of(Path("/data/my disk/x"), mounts) == "xfs"
    assert file_system_of(Path("/database"), mounts) == "ext4"


def changed(**versions):
    """`VERSIONS` with others installed; None for what is not."""
    installed = {**VERSIONS.installed, **{k.replace("_", "-"): v for k, v in versions.items()}}
    return replace(VERSIONS, installed={k: v for k, v in installed.items() if v is not None})


@pytest.mark.parametrize(
    ("versions", "name", "fix"),
    [
        (changed(jaxlib="0.9.0", jax_cuda13_plugin=None, jax_cuda13_pjrt=None), "jaxlib", "jaxlib"),
        (changed(optax=None), "optax", "pip install 'optax'"),
        (changed(jax_cuda13_plugin="0.9.1"), "jax-cuda13-plugin", "jax-cuda13-plugin==0.10.2"),
        (replace(VERSIONS, driver="550.1"), "NVIDIA driver", "jax[cuda12]"),
        (
            changed(jax_cuda13_plugin=None, jax_cuda13_pjrt=None),
            "CUDA plug-in",
            "pip install 'jax[cuda13]'",
        ),
    ],
)
def test_versions_that_do_not_fit(versions, name, fix):
    """Each is bad, with what to install."""
    finding = troubled(version_findings(versions))[name]

    assert finding.verdict == "bad"
    assert fix in finding.fix


def around(**changes):
    """Where variables are judged: eight cores, no GPU."""
    return replace(Surroundings(cores=8, gpus=0), **changes)


@pytest.mark.parametrize(
    ("name", "value", "where", "verdict"),
    [
        ("JAX_PLATFORMS", "cpu", around(gpus=8), "bad"),
        ("JAX_PLATFORMS", "cuda", around(), "bad"),
        ("CUDA_VISIBLE_DEVICES", "", around(gpus=8), "bad"),
        ("CUDA_VISIBLE_DEVICES", "0,1", around(gpus=8), "warn"),
        ("JAX_DISABLE_JIT", "true", around(), "bad"),
        ("XLA_FLAGS", "--xla_dump_to=/tmp/x", around(), "warn"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=8", around(), "warn"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", around(gpus=1), "warn"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", around(gpus=1), "bad"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".3", around(gpus=1), "warn"),
        ("NCCL_P2P_DISABLE", "1", around(gpus=8), "warn"),
        ("NCCL_SOCKET_IFNAME", "lo", around(processes=2), "warn"),
        ("OMP_NUM_THREADS", "64", around(), "warn"),
        ("TF_CPP_MIN_LOG_LEVEL", "3", around(), "warn"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "true", around(), "warn"),
        ("LD_LIBRARY_PATH", "/usr/local/cuda-11.8/lib64", around(gpus=1), "warn"),
        ("https_proxy", "http://me:secret@proxy:3128", around(), "warn"),
        ("JAX_COORDINATOR_ADDRESS", "old:1234", around(), "warn"),
    ],
)
def test_variables_that_bite(name, value, where, verdict):
    """Named, with what to do; a password in one is not said."""
    (finding,) = variable_findings({name: value}, where)

    assert (finding.name, finding.verdict) == (name, verdict)
    assert finding.fix
    assert "{" not in finding.fix
    assert "secret" not in finding.value


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("JAX_PLATFORMS", "cpu", around()),
        ("JAX_PLATFORMS", "cuda", around(gpus=1)),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7", around(gpus=8)),
        ("JAX_DISABLE_JIT", "0", around()),
        ("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true", around()),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9", around(gpus=1)),
        ("OMP_NUM_THREADS", "8", around()),
        ("NCCL_SOCKET_IFNAME", "eth0", around(processes=2)),
    ],
)
def test_variables_that_do_not_bite(name, value, where):
    """The same ones at other values, or elsewhere."""
    (finding,) = variable_findings({name: value}, where)

    assert finding.verdict == "ok"


def test_a_proxy_is_harmless_where_it_spares_the_coordinator():
    """By the end of its name, as no_proxy goes."""
    proxy = {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,.cluster.local"}

    assert not troubled(variable_findings(proxy, around(coordinator="a.cluster.local:1")))
    assert troubled(variable_findings(proxy, around(coordinator="node7:1")))


def test_a_name_that_leads_nowhere_is_bad():
    """Processes could not find each other."""
    lost = Network(host_name="box", address=None, loopback_problem="denied")

    findings = troubled(network_findings(lost, place=None))

    assert findings["name box"].verdict == findings["loopback ports"].verdict == "bad"
    assert "/etc/hosts" in fix_of(findings["name box"])


def test_clock_offsets_are_bounded_by_round_trips():
    """Three clocks of known offsets, all-gathers of uneven length: each is within its bounds."""
    ahead = (0.0, 90.0, -0.25)
    stamps, ends, now = [], [], 1000.0
    for round_ in range(8):
        enters = [now + delay * (1 + round_ % 3) for delay in (0.01, 0.03, 0.02)]
        stamps.append([moment + offset for moment, offset in zip(enters, ahead, strict=True)])
        now = max(enters) + 0.005
        ends.append(now + ahead[0])

    offsets = clock_offsets(stamps, ends, mine=0)

    for offset, truth in zip(offsets, ahead, strict=True):
        assert offset.least_seconds <= truth <= offset.most_seconds
        assert offset.most_seconds - offset.least_seconds < 0.1
    finding = clock_finding(offsets)
    assert (finding.name, finding.verdict) == ("clock of process 1", "bad")
    assert "NTP" in fix_of(finding)


def test_a_slow_collective_alone_makes_no_clock_wrong():
    """Bounds of seconds about nothing are no offset."""
    within = ClockOffset(least_seconds=-20.0, most_seconds=30.0)

    assert clock_finding([within, within]).verdict == "ok"


def test_devices_that_are_not_those_of_the_cluster():
    """Others, fewer, or left idle."""
    a100 = replace(EIGHT, kind="NVIDIA A100-SXM4-80GB")
    idle = replace(EIGHT, platform="cpu", kind="cpu", count=1, local_count=1, memory_bytes=None)

    assert "other devices" in fix_of(troubled(device_findings(a100, H100))["devices"])
    assert "nvidia-smi" in fix_of(
        troubled(device_findings(replace(EIGHT, count=4), H100))["devices"]
    )
    assert "JAX_PLATFORMS" in fix_of(troubled(device_findings(idle, None))["devices"])
    assert "memory of each" in troubled(
        device_findings(replace(EIGHT, memory_bytes=30 * GIB), H100)
    )


@pytest.mark.parametrize("reason", ["", "Unable to initialize backend 'cuda'.\nmore"])
def test_a_jax_that_does_not_start_is_bad(reason):
    """With what it said first, if anything."""
    finding = no_devices(reason)

    assert finding.verdict == "bad"
    assert fix_of(finding).startswith(reason.split("\n")[0] or "JAX found none")


def test_a_chip_is_known_by_its_name_and_memory(monkeypatch):
    """As JAX says them, which takes three quarters."""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    small = replace(EIGHT, kind="NVIDIA A100-SXM4-40GB", memory_bytes=int(0.75 * 42e9))

    assert name_of(detected_chip(EIGHT)) == "h100"
    assert name_of(detected_chip(small)) == "a100-40gb"
    assert detected_chip(replace(EIGHT, kind="Radeon")) is None


def rates(part):
    """Such a part of what a DGX H100 is sold for, 8192^3 in bf16 and HBM, and of XLA's own
    all-reduce over its eight GPUs (openxla/xla, tables of measured collectives: 64 MiB of f32)."""
    group = DeviceGroup(extents=((8, 1),), axes=())
    return Rates(
        rate_type="bf16",
        width=8192,
        flop_per_second=part * 700e12,
        moved_bytes=2**30,
        memory_bytes_per_second=part * 2.85e12,
        reduced_bytes=2**26,
        collectives=(
            MeasuredCollective(axis="devices of a process", group=group, seconds=3.798e-4 / part),
        ),
    )


def test_rates_are_held_against_what_predictions_go_by():
    """All is well at the rates published for it; at a third, all three are bad."""
    chip = chip_when_busy(H100, 8)
    well, ill = (list(rate_findings(rates(part), chip, H100)) for part in (1, 1 / 3))

    assert len(well) == 3
    assert not troubled(well)
    assert [each.verdict for each in ill] == ["bad"] * 3
    assert "nvidia-smi" in fix_of(ill[0])
    assert "NCCL_DEBUG" in fix_of(ill[2])
    assert all(each.expected is None for each in rate_findings(rates(1), None, None))


def test_findings_of_processes_are_told_apart():
    """One speaks for all where all is well; what is not names its processes."""
    fine = list(host_findings(WELL))
    poor = list(host_findings(replace(WELL, open_files=256)))
    new = Finding(topic="versions", name="jax", value="0.10.2")
    old = replace(new, value="0.9.0")

    said = list(together([[new, *fine], [new, *poor], [old, *poor]]))

    assert len(said) == 1 + len(fine)
    assert troubled(said)["open files"].processes == (1, 2)
    assert troubled(said)["jax"].value == "0.10.2, 0.9.0"
    assert troubled(together([poor, poor]))["open files"].processes == ()


@pytest.mark.parametrize(
    ("said", "expected"),
    [("7.5", "f16"), ("8.0", "bf16"), ("10.3", "bf16"), ("gfx90a", "bf16"), (None, "bf16")],
)
def test_devices_are_measured_in_the_type_that_they_train_in(said, expected):
    """GPUs before Ampere have no bf16; AMD's say a name for it."""
    device = SimpleNamespace(platform="gpu", compute_capability=said)

    assert _rate_type(device) == expected


def test_a_process_without_devices_says_so_itself_and_waits_for_none(tmp_path, monkeypatch):
    """It can tell the others nothing, without devices; one that only misses it has no such
    finding."""

    def fail(error):
        raise error

    place = Place(process=1, processes=2, coordinator=None, told_by="a test")
    monkeypatch.setattr(devices, "read_devices", lambda: fail(RuntimeError("no CUDA driver")))

    said = examine(tmp_path, tmp_path, {}, place=place)

    assert "no CUDA driver" in fix_of(troubled(said)["devices"])
    assert {each.processes for each in said} == {(1,)}
    lost = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
    monkeypatch.setattr(devices, "read_devices", lambda: fail(lost))
    with pytest.raises(jax.errors.JaxRuntimeError):
        examine(tmp_path, tmp_path, {}, place=place)


@pytest.mark.parametrize("is_here", [True, False])
def test_devices_that_fail_at_work_are_a_finding_and_nobody_waits_for_them(monkeypatch, is_here):
    """All report their status before the first collective."""
    told = []

    def measure(on_progress):
        if is_here:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return replace(rates(1.0), collectives=())

    def say(text, processes):
        told.append(text)
        return (text, "measured" if is_here else "failed")

    monkeypatch.setattr(devices, "measure", measure)
    monkeypatch.setattr(devices, "measure_all_reduce", lambda rates: pytest.fail("others wait"))
    monkeypatch.setattr(examination, "_said_by_all", say)

    seen = replace(EIGHT, processes=2)
    said = list(examination._of_devices(None, seen, 1, lambda name: None))

    assert told == ["failed" if is_here else "measured"]
    assert ("devices at work" in troubled(said)) == is_here


def start(folder, *flags, **variables):
    """The command in a process of its own, with a cache of its own."""
    environment = {
        "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "80",
        "SCALEJAX_CACHE": str(folder / "cache"),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", CODE, "doctor", "--folder", str(folder), *flags],
        env=os.environ | environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow  # two processes import JAX, and measure this machine for seconds
@pytest.mark.alone
def test_the_command_finds_what_bites_and_examines_processes_together(tmp_path):
    """Two of them, which have met: a variable that bites and what goes with it, within 80 columns;
    the way between them is measured, and their clocks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = {"SCALEJAX_COORDINATOR": f"127.0.0.1:{port}", "SCALEJAX_PROCESSES": "2"}
    variables = place | {"JAX_DISABLE_JIT": "0", "CUDA_LAUNCH_BLOCKING": "1"}
    path = tmp_path / "findings.json"
    flags = ("--json", str(path))
    both = [start(tmp_path, *flags, **variables, SCALEJAX_PROCESS=str(number)) for number in (0, 1)]
    (said, progress), (other, _) = (each.communicate(timeout=300) for each in both)

    assert both[0].returncode == both[1].returncode == 1, said + progress
    assert not [line for line in other.splitlines() if not line.startswith("[Gloo]")]
    assert "measuring matrix products" in progress
    spoken = [line for line in said.splitlines() if "[Gloo]" not in line]
    assert max(map(len, spoken[:-1])) <= 80  # but for the path of the file
    assert "bad CUDA_LAUNCH_BLOCKING: 1\n     the host waits for every kernel" in said
    assert "all-reduce, 2 processes" in " ".join(said.split())
    assert "reached by 2 processes" in said
    findings = json.loads(path.read_text())["findings"]
    assert {each["topic"] for each in findings} == {
        "versions", "devices", "rates", "host", "storage", "network", "variables",
    }  # fmt: skip
    assert "clocks" in {each["name"] for each in findings}
    bad = [each["name"] for each in findings if each["verdict"] == "bad"]
    assert "CUDA_LAUNCH_BLOCKING" in bad
