"""A program is compiled once, and again when anything that shapes it has changed."""

from dataclasses import replace

import pytest
from program_cases import program_of
from test_compile import resolved

from scalejax.core.errors import DoesNotFit, ProfileError
from scalejax.core.progress import Progress
from scalejax.hardware import load_cluster
from scalejax.xla import ProfileJob, profile, profile_each, profile_many, worker_pool
from scalejax.xla.job import Compiled

OWN_NETWORK = '''
from flax import nnx
from scalejax.models import Network

class Linear(Network):
    """One layer."""

    def __init__(self, dataset, *, compute_dtype, bn, rngs):
        self.layer = nnx.Linear(784, dataset.classes, rngs=rngs)

    def __call__(self, inputs, *, is_training):
        return self.layer(inputs.reshape(len(inputs), -1))
'''


def _answer(jobs, on_done, on_error):
    for position in range(len(jobs)):
        on_done(position, Compiled(program=program_of()))


def _refuse(jobs, on_done, on_error):
    raise ProfileError("asked to compile")


def test_a_cached_program_is_found_again_and_a_changed_run_is_not(tmp_path, monkeypatch):
    """Seeds and epochs do not shape a step; widths do. A data axis of its size is the same as one
    that is left open."""
    cluster, wider = load_cluster("dgx-h100"), {"model": {"name": "mlp", "hidden": [64]}}
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", _answer)
    first = profile(resolved("mlp", 8), cluster, cache=tmp_path)
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", _refuse)

    assert profile(resolved("mlp", 8), cluster, cache=tmp_path) == first
    again = resolved("mlp", 8, seed=7, train={"epochs": 90})
    assert profile(again, cluster, cache=tmp_path) == first
    spelled = resolved("mlp", 8, layout={"data": 8})
    assert profile(spelled, cluster, cache=tmp_path) == first
    for changed in (resolved("mlp", 16), resolved("mlp", 8, **wider)):
        with pytest.raises(ProfileError, match="asked to compile"):
            profile(changed, cluster, cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:100])  # a full disk, an older release
    with pytest.raises(ProfileError, match="asked to compile"):
        profile(resolved("mlp", 8), cluster, cache=tmp_path)


@pytest.mark.slow
def test_a_cached_program_of_ones_own_network_lasts_until_its_file_changes(tmp_path, monkeypatch):
    """The file that the network was imported from is part of what shapes it."""
    file = tmp_path / "my_network.py"
    file.write_text(OWN_NETWORK)
    monkeypatch.chdir(tmp_path)
    run = resolved("mlp", 2, model={"name": "custom", "path": "my_network:Linear"})
    cluster, folder = load_cluster("dgx-h100"), tmp_path / "cache"
    first = profile(run, cluster, cache=folder, backend="cpu")
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", _refuse)

    assert profile(run, cluster, cache=folder, backend="cpu") == first
    file.write_text(OWN_NETWORK + "# changed")
    with pytest.raises(ProfileError, match="asked to compile"):
        profile(run, cluster, cache=folder, backend="cpu")


def test_the_same_import_path_in_another_folder_is_another_network(tmp_path, monkeypatch):
    """Two projects may each have a my_network.py."""
    run = resolved("mlp", 2, model={"name": "custom", "path": "my_network:Linear"})
    cluster, folder = load_cluster("dgx-h100"), tmp_path / "cache"
    for name, text in (("one", OWN_NETWORK), ("two", OWN_NETWORK + "# another")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_network.py").write_text(text)
    monkeypatch.chdir(tmp_path / "one")
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", _answer)
    profile(run, cluster, cache=folder, backend="cpu")
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", _refuse)
    monkeypatch.chdir(tmp_path / "two")

    with pytest.raises(ProfileError, match="asked to compile"):
        profile(run, cluster, cache=folder, backend="cpu")


def test_compiler_flags_of_the_user_make_another_program(tmp_path, monkeypatch):
    """What is costed is what would train under them."""
    run, cluster = resolved("mlp", 2), load_cluster("dgx-h100")
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", _answer)
    profile(run, cluster, cache=tmp_path, backend="cpu")
    monkeypatch.setattr("scalejax.xla.batch.run_jobs", _refuse)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false")

    with pytest.raises(ProfileError, match="asked to compile"):
        profile(run, cluster, cache=tmp_path, backend="cpu")
    assert worker_pool._environment(None)["XLA_FLAGS"].endswith("latency_hiding_scheduler=false")


def test_programs_are_compiled_beside_those_that_are_refused(tmp_path, monkeypatch):
    """As a search confirms its best together: one that the compiler or the cluster refuses has its
    reason, and the others their programs; every one that began is said to be done."""

    def some(jobs, on_done, on_error):
        assert len(jobs) == 2  # in one call, which compiles them in parallel
        error = ProfileError("refused")
        if on_error is None:
            raise error
        on_error(0, error)
        on_done(1, Compiled(program=program_of()))

    monkeypatch.setattr("scalejax.xla.batch.run_jobs", some)
    cluster, told = load_cluster("dgx-h100"), list[Progress]()
    one_node = replace(cluster, max_device_count=8)
    jobs = [
        ProfileJob(run=resolved("mlp", 4), cluster=cluster, name="refused"),
        ProfileJob(run=resolved("mlp", 16), cluster=one_node, name="too large"),
        ProfileJob(run=resolved("mlp", 8), cluster=cluster, name="compiled"),
    ]

    refused, too_large, compiled = profile_each(jobs, told.append, cache=tmp_path)
    assert str(refused) == "refused"
    assert isinstance(too_large, DoesNotFit)
    assert compiled == program_of()
    assert [(each.part, each.done) for each in told] == [
        ("too large", 1),
        ("refused", 0),
        ("compiled", 0),
        ("refused", 1),
        ("compiled", 1),
    ]
    with pytest.raises(ProfileError, match="refused"):
        profile_many([jobs[0], jobs[2]], cache=None)
