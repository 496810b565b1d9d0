"""`hybridengine launch kuberay`: write a RayJob manifest for KubeRay, or create the job."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

from hybridengine.cli.launch_options import (
    RETRIES,
    add_output_options,
    add_run_options,
    add_size_options,
    deliver,
    note,
)
from hybridengine.cli.options import between
from hybridengine.errors import ConfigError
from hybridengine.launch.kuberay import PodSize, RayJob, kubernetes_name, manifest
from hybridengine.launch.shape import launched_config, shape_of, train_arguments
from hybridengine.launch.slurm import run_program

DESCRIPTION = """Write a RayJob manifest (ray.io/v1) that carries out a run with KubeRay: a head pod without ranks, which
runs the controller, and a worker pod for each node that the configuration needs, with its GPUs and /dev/shm. Ray asks for
a token, of which KubeRay makes a secret. Failed pods are replaced, and a failed run starts again on new pods and resumes
from its last checkpoint, up to --retries times, also if it fails in the same way each time.

--claim names a volume that all pods can write to (ReadWriteMany), with the configuration, model, data and runs/. The
image has this project installed. Standard output has the manifest unless --output or --submit is given."""

EPILOG = """examples:
  hybridengine launch kuberay configs/llama3-70b-16nodes.yaml --image team/hybridengine:1 --claim lustre --submit
  hybridengine launch kuberay configs/qwen3-235b.yaml --image team/hybridengine:1 --claim lustre --folder /shared/rl \\
      --cpus-per-node 96 --memory 1500Gi --resource rdma/ib=8 --capability IPC_LOCK --output job.yaml
  hybridengine launch kuberay CONFIG --image IMAGE --claim CLAIM --queue team-a --env NCCL_IB_HCA=mlx5    with Kueue
"""
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGT]i|[MGT])?")
UNITS = {"": 1, "m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
NAME, WORD = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?"
NAMESPACE = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
KEY = rf"({NAME}/)?{WORD}"
RESOURCE = (
    rf"{NAME}/{WORD}|ephemeral-storage|hugepages-[0-9]+[KMG]i",
    "a resource with its domain, such as nvidia.com/gpu",
)
VARIABLE = (r"[A-Za-z_][A-Za-z0-9_.-]*", "the name of a variable, such as NCCL_DEBUG")
LABEL = (KEY, "the key of a label, such as nvidia.com/gpu.product")
LABEL_VALUE = (rf"({WORD})?", "the value of a label, such as h100")
SYSTEM_FOLDERS = {
    (),
    *((name,) for name in ("bin", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")),
}
"""First parts of paths at which a pod cannot have a volume, or would lose its programs; () is that of the root."""
HEAD_CPUS = "8"
LEAST_RAY = (2, 52)
"""First version of Ray in which KubeRay lets jobs ask for a token (authOptions)."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    option, seconds = parser.add_argument, between(0, 31_536_000)
    name = _matching(NAME, "a name of Kubernetes: a-z, 0-9, - and ., such as team-a")
    namespace = _matching(
        NAMESPACE, "a namespace of Kubernetes: at most 63 of a-z, 0-9 and -, such as team-a"
    )
    option(
        "--image",
        required=True,
        type=_matching(r"[\w./:@-]+", "an image, such as team/hybridengine:1"),
        metavar="IMAGE",
        help="container image with this project",
    )
    option(
        "--claim", required=True, type=name, metavar="NAME", help="PersistentVolumeClaim that all pods share"
    )
    option("--mount", default="/shared", metavar="PATH", help="where the volume is mounted")
    option("--folder", metavar="PATH", help="folder in which all pods start (default: that of --mount)")
    option("--namespace", type=namespace, default="default", metavar="NAME", help="namespace of the job")
    option("--job-name", metavar="NAME", help="name of the RayJob (default: run.name, in its letters)")
    add_size_options(parser)
    option("--memory", type=_quantity, default="512Gi", metavar="SIZE", help="memory of a worker pod")
    option("--shared-memory", type=_quantity, default="64Gi", metavar="SIZE",
           help="/dev/shm of each pod, which counts as its memory")  # fmt: skip
    option("--head-cpus", type=_quantity, default=HEAD_CPUS, metavar="N", help="CPUs of the head pod")
    option("--head-memory", type=_quantity, default="96Gi", metavar="SIZE", help="memory of the head pod")
    option(
        "--gpu-resource",
        type=_matching(*RESOURCE),
        default="nvidia.com/gpu",
        metavar="NAME",
        help="resource of GPUs",
    )
    option("--resource", action="append", default=[], metavar="NAME=N",
           help="further resource of a worker pod, such as rdma/ib=8; may be repeated")  # fmt: skip
    option("--capability", action="append", default=[], metavar="NAME", type=_matching("[A-Z_]+", "a capability"),
           help="capability of a worker pod, such as IPC_LOCK, which RDMA needs; may be repeated")  # fmt: skip
    option(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable; may be repeated",
    )
    option("--secret", action="append", type=name, default=[], metavar="NAME",
           help="secret whose keys become environment variables; may be repeated")  # fmt: skip
    option("--service-account", type=name, metavar="NAME", help="service account of the pods")
    option("--node-selector", action="append", default=[], metavar="LABEL=VALUE",
           help="label of the nodes of worker pods; may be repeated")  # fmt: skip
    option("--toleration", action="append", default=[], metavar="KEY",
           type=_matching(KEY, "the key of a taint, such as nvidia.com/gpu"),
           help="taint that worker pods tolerate; may be repeated")  # fmt: skip
    option("--queue", type=name, metavar="NAME", help="queue of Kueue, which admits the job")
    option(
        "--ray-version",
        type=_ray_version,
        metavar="VERSION",
        help="Ray in the image (default: the version here)",
    )
    option(
        "--retries",
        type=between(0, 1000),
        default=RETRIES,
        metavar="N",
        help="starts after the first one, whatever it failed of",
    )
    option("--start-limit", type=seconds, default=0, metavar="SECONDS",
           help="time until the run begins, queueing included; 0 for none")  # fmt: skip
    option("--keep", type=seconds, default=600, metavar="SECONDS", help="time for which ended pods are kept")
    add_output_options(parser, "kubectl create")


def run(options: argparse.Namespace) -> int:
    config = launched_config(options.config, options.overrides)
    shape = shape_of(config, options.gpus_per_node, options.cpus_per_node)
    for name in ("mount", "folder"):
        path = getattr(options, name)
        if path is not None and not path.startswith("/"):
            raise ConfigError(f"--{name} {path} must be an absolute path in the pods, such as /shared")
    if ":" in options.mount or Path(os.path.normpath(options.mount)).parts[1:2] in SYSTEM_FOLDERS:
        raise ConfigError(
            f"--mount {options.mount} would replace a folder of the pod's system, or has a colon; choose another, such as"
            " /shared"
        )
    folder = Path(options.folder or options.mount)
    if not Path(os.path.normpath(folder)).is_relative_to(os.path.normpath(options.mount)):
        raise ConfigError(
            f"--folder {folder} is not below --mount {options.mount}, the volume that all pods share; choose one there"
        )
    written = os.path.normpath(folder / config.run_folder)
    if not Path(written).is_relative_to(os.path.normpath(options.mount)):
        raise ConfigError(
            f"run.folder={config.run.folder} is not below --mount {options.mount}, the volume that all pods share, and"
            " what the run writes there would end with its pod; choose one there"
        )
    cpus = options.cpus_per_node or shape.default_cpus
    shared = options.shared_memory
    if _number(shared) >= _number(options.memory):
        raise ConfigError(
            f"--shared-memory {shared} is not less than --memory {options.memory}, of which it is a part; lower it, or"
            " raise --memory"
        )
    environment = _pairs("--env", options.env, _matching(*VARIABLE))
    for key in environment:
        if key.startswith("RAY_AUTH_"):
            raise ConfigError(f"--env {key} is set by KubeRay, for the token of the cluster; leave it out")
    resources = _pairs("--resource", options.resource, _matching(*RESOURCE), _quantity)
    if options.gpu_resource in resources:
        raise ConfigError(
            f"--resource {options.gpu_resource} is set by this command, from --gpus-per-node; change that instead"
        )
    labels = _pairs("--node-selector", options.node_selector, _matching(*LABEL), _matching(*LABEL_VALUE))
    job = RayJob(
        name=kubernetes_name(options.job_name or config.run.name),
        namespace=options.namespace,
        image=options.image,
        ray_version=options.ray_version or version("ray"),
        shape=shape,
        arguments=train_arguments(options.config, options.overrides, "auto"),
        claim=options.claim,
        mount=options.mount,
        folder=str(folder),
        head=PodSize(options.head_cpus, options.head_memory, min(shared, options.head_memory, key=_number)),
        worker=PodSize(str(cpus), options.memory, shared, resources),
        gpu_resource=options.gpu_resource,
        environment=environment,
        capabilities=options.capability,
        secrets=options.secret,
        service_account=options.service_account or "",
        queue=options.queue or "",
        node_selector=labels,
        tolerations=options.toleration,
        retries=options.retries,
        start_limit_s=options.start_limit,
        keep_s=options.keep,
    )
    text = manifest(job)
    note(f"{job.name}: {shape}, and a head")
    deliver(options, text, lambda text: _create(text, job))
    return 0


def _create(text: str, job: RayJob) -> None:
    """Create the job; `kubectl apply` would start nothing where one of this name has ended, and change one that runs."""
    command = ["kubectl", "create", "--filename", "-"]
    try:
        note(run_program(command, text, "kubectl", "create the job where kubectl is"))
    except ConfigError as error:
        if "(AlreadyExists)" not in str(error):
            raise
        raise ConfigError(
            f"namespace {job.namespace} has a RayJob {job.name} already, of an earlier or of another run; delete it with"
            f" `kubectl delete rayjob {job.name} --namespace {job.namespace}`, which ends it if it runs, or choose"
            " another --job-name"
        ) from None


def _quantity(text: str) -> str:
    """Return a quantity of Kubernetes unchanged; a `type=` for argparse."""
    if not QUANTITY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is not a quantity of Kubernetes; write a number, or one with a unit such as 64Gi"
        )
    if not _number(text):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} must be more than 0")
    return text


def _number(quantity: str) -> Fraction:
    """Return the number that a quantity of Kubernetes stands for."""
    digits = quantity.rstrip("mkKMGTi")
    return Fraction(digits) * UNITS[quantity[len(digits) :]]


def _matching(pattern: str, meaning: str) -> Callable[[str], str]:
    """Return a `type=` for argparse that accepts texts of a pattern unchanged."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text[:60]!r} is not {meaning}")
        return text

    return check


def _ray_version(text: str) -> str:
    """Return a version of Ray that knows tokens unchanged; a `type=` for argparse."""
    match = re.match(r"(\d+)\.(\d+)\.\d", text)
    if match is None or tuple(map(int, match.groups())) < LEAST_RAY:
        least = ".".join(map(str, LEAST_RAY))
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} must be a version of Ray from {least}.0, which has tokens"
        )
    return text


def _pairs(
    option: str, texts: Sequence[str], key: Callable[[str], str], kind: Callable[[str], str] = str
) -> dict[str, str]:
    """Return the values in `texts` by name; `key` and `kind` check names and values."""
    found = dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(
                f"{option} {text!r} is not NAME=VALUE; write both, with an equals sign between them"
            )
        try:
            found[key(name)] = kind(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{option} {text}: {error}") from None
    return found
