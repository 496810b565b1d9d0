"""RayJob manifests of KubeRay: a head that carries out the run, and a pod for each node."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from hybridengine.errors import ConfigError
from hybridengine.launch.shape import Shape

MAX_NAME = 47
"""Largest length of a RayJob's name (KubeRay's MaxRayJobNameLength)."""
VOLUME, SHARED_MEMORY = "cluster-files", "shared-memory"
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0"}
HEADER = """# {name}: {shape}.
# Written by `hybridengine launch kuberay`; start it with kubectl create, watch it with kubectl get rayjob {name}
# --namespace {namespace}.
"""


@dataclass(frozen=True)
class PodSize:
    """Resources of a pod, as Kubernetes writes quantities; its requests are its limits."""

    cpus: str
    memory: str
    shared_memory: str
    """Size of /dev/shm, which counts as the pod's memory: Ray's object store, and collectives."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further resources, such as rdma/ib: 1."""


@dataclass(frozen=True)
class RayJob:
    """Settings of a manifest that do not come from the run."""

    name: str
    namespace: str
    image: str
    ray_version: str
    shape: Shape
    arguments: Sequence[str]
    """Arguments of `hybridengine` that carry out the run."""
    claim: str
    """PersistentVolumeClaim of the file system that all pods share."""
    mount: str
    folder: str
    """Folder in which all pods start, on that file system."""
    head: PodSize
    worker: PodSize
    gpu_resource: str
    environment: Mapping[str, str]
    capabilities: Sequence[str]
    """Capabilities of Linux that worker pods have in addition."""
    secrets: Sequence[str]
    """Secrets whose keys become environment variables of all pods."""
    service_account: str
    queue: str
    """Queue of Kueue; empty for none."""
    node_selector: Mapping[str, str]
    """Labels of the nodes of the worker pods."""
    tolerations: Sequence[str]
    """Keys of taints that the worker pods tolerate."""
    retries: int
    start_limit_s: int
    """Time limit until the run begins, queueing included; 0 for none."""
    keep_s: int
    """Seconds for which pods are kept after the end."""


def kubernetes_name(text: str) -> str:
    """Return a name that a RayJob may have, similar to `text`.

    Raises:
        ConfigError: `text` has no letter or digit.
    """
    name = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_NAME].strip("-")
    if not name:
        raise ConfigError(
            f"{text!r} has no ASCII letter or digit for the name of a RayJob; give one with --job-name"
        )
    return name if name[0].isalpha() else f"run-{name}"[:MAX_NAME].strip("-")


def manifest(job: RayJob) -> str:
    """Return the manifest of a job as YAML."""
    return HEADER.format(name=job.name, namespace=job.namespace, shape=job.shape) + yaml.safe_dump(
        rayjob(job), sort_keys=False, width=120
    )


def rayjob(job: RayJob) -> dict[str, Any]:
    """Return the RayJob as Kubernetes reads it.

    A failed run is started again on new pods up to `retries` times, and resumes from its last checkpoint.
    """
    labels = {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}
    groups = Counter(job.shape.rooms)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            "name": job.name,
            "namespace": job.namespace,
            **({"labels": labels} if labels else {}),
        },
        "spec": {
            "entrypoint": shlex.join(["hybridengine", *job.arguments]),
            "submissionMode": "K8sJobMode",
            "backoffLimit": job.retries,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": job.keep_s,
            **({"preRunningDeadlineSeconds": job.start_limit_s} if job.start_limit_s else {}),
            **({"suspend": True} if job.queue else {}),  # until Kueue admits it
            "rayClusterSpec": {
                "rayVersion": job.ray_version,
                "authOptions": {"mode": "token"},  # KubeRay makes a secret for each cluster
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},  # no ranks
                    "template": {"spec": _pod(job, "ray-head", job.head, 0)},
                },
                "workerGroupSpecs": [
                    _worker_group(job, ranks, replicas, one_of_many=len(groups) > 1)
                    for ranks, replicas in groups.items()
                ],
            },
        },
    }


def _worker_group(job: RayJob, ranks: int, replicas: int, *, one_of_many: bool) -> dict[str, Any]:
    """Return the group of pods with this number of ranks; pods with fewer ranks have fewer GPUs."""
    num_gpus = (ranks if one_of_many else job.shape.num_gpus) if job.shape.num_gpus else 0
    pod = _pod(job, "ray-worker", job.worker, num_gpus)
    if job.capabilities:
        pod["containers"][0]["securityContext"] = {"capabilities": {"add": list(job.capabilities)}}
    if job.node_selector:
        pod["nodeSelector"] = dict(job.node_selector)
    if job.tolerations:
        pod["tolerations"] = [{"key": key, "operator": "Exists"} for key in job.tolerations]
    return {
        "groupName": f"nodes-of-{ranks}",
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": replicas,
        "rayStartParams": {} if num_gpus else {"num-cpus": str(ranks)},
        "template": {"spec": pod},
    }


def _pod(job: RayJob, name: str, size: PodSize, num_gpus: int) -> dict[str, Any]:
    resources = {"cpu": size.cpus, "memory": size.memory, **size.more}
    if num_gpus:
        resources[job.gpu_resource] = str(num_gpus)
    container = {
        "name": name,
        "image": job.image,
        "workingDir": job.folder,  # of Ray and the run, and so of all ranks
        "env": [{"name": key, "value": value} for key, value in {**ENVIRONMENT, **job.environment}.items()],
        **({"envFrom": [{"secretRef": {"name": one}} for one in job.secrets]} if job.secrets else {}),
        "resources": {"limits": dict(resources), "requests": dict(resources)},
        "volumeMounts": [
            {"name": VOLUME, "mountPath": job.mount},
            {"name": SHARED_MEMORY, "mountPath": "/dev/shm"},
        ],
    }
    return {
        "containers": [container],
        "volumes": [
            {"name": VOLUME, "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": size.shared_memory}},
        ],
        **({"serviceAccountName": job.service_account} if job.service_account else {}),
    }
