"""The manifest of a run as a JobSet of Kubernetes: one pod per node, the first the coordinator.

Writes a manifest but does not apply it. Variables give the pods the address of the coordinator, by
the host name that JobSet assigns, so that no access to the cluster's API is needed: JAX's own
detection needs the package `kubernetes` and a service account that may read pods and jobs.

Source: JobSet v1alpha2 (jobset.sigs.k8s.io), Job and Pod of Kubernetes 1.31 (indexed jobs, pod
failure policy).
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from scalejax.core import process_group
from scalejax.core.errors import (
    FINAL_CODES,
    ConfigError,
    ExitCode,
    refusal,
    require_at_least,
    require_one_line,
)

PORT = 29400
"""Port of the coordinator; any port would do, since every pod has its own address."""

_REPLICA = "train"
_CONFIG_FOLDER, _FILE = "/etc/scalejax", "run.toml"
_RUNS_FOLDER = "/runs"
_LONGEST_NAME = 40
"""Longest name of a JobSet: names of its pods, NAME-train-0-1234-abcde, must fit in 63 letters."""
_SECONDS_TO_SAVE = 600
"""Grace period to save a checkpoint and stop, as in `launch.local`."""
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetRun:
    """A run as a JobSet: config, container image, volume, resources."""

    name: str
    """Name of the JobSet, and of its folder in the volume."""
    run_toml: str
    """Content of the run.toml."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `scalejax train`."""
    slots: int
    """Total number of GPUs, or of processes if no GPUs are requested."""
    gpus_per_node: int | None = None
    """GPUs per node, all driven by its one process; None for one CPU process per pod."""
    image: str
    """The container image, with scalejax installed."""
    volume: str
    """Volume of the run record and checkpoints: the name of a PersistentVolumeClaim, or a path that
    all nodes see."""
    namespace: str | None = None
    """Namespace; None for that of kubectl."""
    most_restarts: int = 0
    """Number of restarts of all pods when one is lost."""

    def __post_init__(self) -> None:
        require_at_least("np", self.slots, 1)
        if self.gpus_per_node is not None:
            require_at_least("gpus_per_node", self.gpus_per_node, 1)
            if self.slots % self.gpus_per_node:
                accepted = f"it must be a multiple of gpus_per_node={self.gpus_per_node}"
                raise ConfigError(refusal("np", self.slots, accepted))
        _require_label("name", self.name, _LONGEST_NAME)
        if self.namespace is not None:
            _require_label("namespace", self.namespace, 63)
        require_one_line("volume", self.volume)
        if not self.volume.startswith("/"):
            _require_label("volume", self.volume, 253)
        if not self.image.strip() or re.search(r"\s", self.image):
            raise ConfigError(refusal("image", self.image, "it must be that of a container"))

    @property
    def pods(self) -> int:
        """Number of pods, each with one process."""
        return self.slots // (self.gpus_per_node or 1)


def manifest(run: JobSetRun) -> str:
    """The YAML of `run`, for `kubectl apply -f`."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes text of several lines in block style."""

    def block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, block)
    parts = (_config_map(run), _job_set(run))
    return yaml.dump_all(parts, Dumper=Dumper, sort_keys=False, width=100, explicit_start=True)


def _config_map(run: JobSetRun) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(run),
        "data": {_FILE: run.run_toml},
    }


def _job_set(run: JobSetRun) -> dict[str, Any]:
    job = {"name": _REPLICA, "replicas": 1, "template": {"spec": _job(run)}}
    refused = {
        "name": "refused",  # or diverged
        "action": "FailJobSet",  # refused input would only be refused again
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(run),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,  # pods connect before any of them is ready
                "subdomain": run.name,
            },
            "failurePolicy": {"maxRestarts": run.most_restarts, "rules": [refused]},
            "replicatedJobs": [job],
        },
    }


def _job(run: JobSetRun) -> dict[str, Any]:
    """The job of all pods, which fails if one of them fails."""
    final = [int(code) for code in FINAL_CODES if code != ExitCode.COMPLETED]
    codes = {"containerName": _REPLICA, "operator": "In", "values": final}
    return {
        "completionMode": "Indexed",
        "completions": run.pods,
        "parallelism": run.pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": _pod(run)},
    }


def _pod(run: JobSetRun) -> dict[str, Any]:
    is_path = run.volume.startswith("/")
    kept = (
        {"hostPath": {"path": run.volume, "type": "Directory"}}
        if is_path
        else {"persistentVolumeClaim": {"claimName": run.volume}}
    )
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SECONDS_TO_SAVE,
        "enableServiceLinks": False,  # adds dozens of variables about other services
        "containers": [_container(run)],
        "volumes": [
            {"name": "config", "configMap": {"name": run.name}},
            {"name": "runs", **kept},
            # By default /dev/shm has 64 MiB, too little for batches of worker processes and NCCL.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _container(run: JobSetRun) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": _REPLICA,
        "image": run.image,
        "command": ["sh", "-c", _shell(run)],
        "env": [
            {"name": process_group.COORDINATOR, "value": coordinator(run)},
            {"name": process_group.PROCESSES, "value": str(run.pods)},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
            {"name": "runs", "mountPath": _RUNS_FOLDER},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if run.gpus_per_node is not None:
        found["resources"] = {"limits": {_GPU: run.gpus_per_node}}
    return found


def coordinator(run: JobSetRun) -> str:
    """Host and port of the first pod: job 0 of the replicated job, index 0, in the subdomain."""
    return f"{run.name}-{_REPLICA}-0-0.{run.name}:{PORT}"


def _shell(run: JobSetRun) -> str:
    """The command that trains, or resumes if the folder holds a run; all pods check this before any
    of them writes."""
    folder = PurePosixPath(_RUNS_FOLDER) / run.name
    words = ("scalejax", "train", f"{_CONFIG_FOLDER}/{_FILE}", "--folder", str(folder))
    command = shlex.join((*words, *run.arguments))
    return f"if [ -e {folder}/run.toml ]; then resume=--resume; fi\nexec {command} $resume\n"


def _metadata(run: JobSetRun) -> dict[str, str]:
    namespace = {} if run.namespace is None else {"namespace": run.namespace}
    return {"name": run.name, **namespace}


def _require_label(field: str, value: str, longest: int) -> None:
    if len(value) > longest or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", value):
        accepted = (
            f"Kubernetes takes up to {longest} small letters, digits and hyphens, a letter first "
            "and no hyphen last"
        )
        raise ConfigError(refusal(field, value, accepted))
