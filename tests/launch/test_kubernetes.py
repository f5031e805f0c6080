"""A run as a JobSet is what Kubernetes takes, and brings its processes together."""

import subprocess
from pathlib import Path

import pytest
import yaml

from scalejax.cli.main import main
from scalejax.core.errors import ConfigError
from scalejax.core.process_group import place_here
from scalejax.launch.kubernetes import JobSetRun, manifest

RUN_TOML = 'seed = 3\n[model]\nname = "mlp"  # "quoted": yes\n'


def run(**changes) -> JobSetRun:
    """Sixteen GPUs on two nodes."""
    values = {
        "name": "fashion",
        "run_toml": RUN_TOML,
        "slots": 16,
        "gpus_per_node": 8,
        "image": "ghcr.io/me/scalejax:1",
        "volume": "my-claim",
        "most_restarts": 3,
    }
    return JobSetRun(**values | changes)


def parts(job: JobSetRun):
    """The ConfigMap and the JobSet of the manifest, as read again."""
    return list(yaml.safe_load_all(manifest(job)))


def pod_of(job_set):
    """The pods' own description."""
    (replicated,) = job_set["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"gpus_per_node": None, "slots": 2, "volume": "/mnt/shared", "namespace": "team"}],
)
def test_it_is_of_the_published_schema(changes):
    """Read into the models that are generated from it, and written again, nothing is lost.

    The models drop fields that the schema has not, and refuse values of other types.
    """
    models = pytest.importorskip("kubeflow_trainer_api.models")
    config_map, job_set = parts(run(**changes))

    of_config = models.IoK8sApiCoreV1ConfigMap.from_dict(config_map)
    of_set = models.JobsetV1alpha2JobSet.from_dict(job_set)

    assert of_config.to_dict() == config_map
    assert of_set.to_dict() == job_set
    (rule,) = job_set["spec"]["failurePolicy"]["rules"]
    actions = models.JobsetV1alpha2FailurePolicyRule.model_fields["action"].description
    assert f" {rule['action']}," in actions  # the models take any text
    wrong = job_set | {"spec": job_set["spec"] | {"restarts": 3}}
    assert models.JobsetV1alpha2JobSet.from_dict(wrong).to_dict() != wrong


def test_pods_meet_at_the_first_by_the_name_that_jobset_gives_it():
    """<jobset>-<replicated job>-<job index>-<pod index>.<subdomain>, and two of them."""
    _, job_set = parts(run())
    (container,) = pod_of(job_set)["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}

    place = place_here(environment | {"JOB_COMPLETION_INDEX": "1"})  # Kubernetes sets that

    assert place is not None
    assert (place.process, place.processes) == (1, 2)
    assert place.coordinator == "fashion-train-0-0.fashion:29400"
    assert place.bind_address is None
    assert job_set["spec"]["network"]["subdomain"] == "fashion"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}


def test_what_was_refused_is_not_tried_again_and_all_else_is():
    """Exit codes 2 and 3 fail the JobSet; a lost process starts all pods again."""
    _, job_set = parts(run())
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    (of_set,) = job_set["spec"]["failurePolicy"]["rules"]

    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    assert of_set["action"] == "FailJobSet"
    assert of_set["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert job["backoffLimit"] == 0
    assert pod_of(job_set)["restartPolicy"] == "Never"


def test_pods_train_the_file_and_go_on_where_a_run_was_begun(tmp_path):
    """By the very command: first without --resume, then with it."""
    config_map, job_set = parts(run(arguments=("--train.epochs=3", '--seed="a b"')))
    (container,) = pod_of(job_set)["containers"]
    shell, flag, command = container["command"]
    command = command.replace("/runs", str(tmp_path / "runs"))
    substitute = tmp_path / "scalejax"
    substitute.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    substitute.chmod(0o755)

    def said() -> list[str]:
        done = subprocess.run(
            [shell, flag, command], env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, text=True,
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    folder = tmp_path / "runs" / "fashion"
    words = ["train", "/etc/scalejax/run.toml", "--folder", str(folder)]
    words += ["--train.epochs=3", '--seed="a b"']
    assert said() == words
    folder.mkdir(parents=True)
    (folder / "run.toml").touch()
    assert said() == [*words, "--resume"]
    assert config_map["data"]["run.toml"] == RUN_TOML
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"config": "/etc/scalejax", "runs": "/runs", "shared-memory": "/dev/shm"}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"slots": 12}, "np=12 is refused: it must be a multiple of gpus_per_node=8"),
        ({"name": "Fashion_1"}, "name='Fashion_1' is refused: Kubernetes takes"),
        ({"volume": "My Claim"}, "volume='My Claim' is refused"),
        ({"image": "a b"}, "image='a b' is refused"),
        ({"slots": 0}, "np=0 is refused"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(changes, refused):
    """Naming the flag."""
    with pytest.raises(ConfigError, match=refused):
        run(**changes)


def test_the_command_writes_it(tmp_path, capsys):
    """With the name of the file, in letters that Kubernetes takes; or refuses in a sentence."""
    example = (
        Path(__file__).parents[2] / "scalejax" / "config" / "examples" / "fashion_no_warmup.toml"
    )
    path = tmp_path / "job.yaml"
    command = ["launch", str(example), "--np", "4", "--target", "jobset"]

    assert main([*command, "--image", "x", "--volume", "y", "--output", str(path)]) == 0
    assert f"kubectl apply -f {path}" in " ".join(capsys.readouterr().out.split())
    config_map, job_set = yaml.safe_load_all(path.read_text())
    assert job_set["metadata"]["name"] == config_map["metadata"]["name"] == "fashion-no-warmup"
    assert config_map["data"]["run.toml"] == example.read_text()

    assert main(command) == 2
    assert "needs --image" in capsys.readouterr().err
    assert main([*command, "--image", "x", "--volume", "y", "--partition", "gpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "partition='gpu' is refused: it is for a run through SLURM" in said
