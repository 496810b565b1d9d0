"""`hybridengine launch kuberay`: write a RayJob manifest for KubeRay, or apply it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version

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
from its last checkpoint, up to --retries times.

--claim names a volume that all pods can write to (ReadWriteMany), with the configuration, model, data and runs/. The
image has this project installed. Standard output has the manifest unless --output or --submit is given."""

EPILOG = """examples:
  hybridengine launch kuberay configs/llama3-70b-16nodes.yaml --image team/hybridengine:1 --claim lustre --submit
  hybridengine launch kuberay configs/qwen3-235b.yaml --image team/hybridengine:1 --claim lustre --folder /shared/rl \\
      --cpus-per-node 96 --memory 1500Gi --resource rdma/ib=8 --toleration nvidia.com/gpu --output job.yaml
  hybridengine launch kuberay CONFIG --image IMAGE --claim CLAIM --queue team-a --env NCCL_IB_HCA=mlx5    with Kueue
"""
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGT]i|[MGT])?")
HEAD_CPUS = "8"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    option, seconds = parser.add_argument, between(0, 31_536_000)
    option("--image", required=True, metavar="IMAGE", help="container image with this project")
    option("--claim", required=True, metavar="NAME", help="PersistentVolumeClaim that all pods share")
    option("--mount", default="/shared", metavar="PATH", help="where the volume is mounted")
    option("--folder", metavar="PATH", help="folder in which all pods start (default: that of --mount)")
    option("--namespace", default="default", metavar="NAME", help="namespace of the job")
    option("--job-name", metavar="NAME", help="name of the RayJob (default: run.name, in its letters)")
    add_size_options(parser)
    option("--memory", type=_quantity, default="512Gi", metavar="SIZE", help="memory of a worker pod")
    option("--shared-memory", type=_quantity, default="64Gi", metavar="SIZE",
           help="/dev/shm of each pod, which counts as its memory")  # fmt: skip
    option("--head-cpus", type=_quantity, default=HEAD_CPUS, metavar="N", help="CPUs of the head pod")
    option("--head-memory", type=_quantity, default="96Gi", metavar="SIZE", help="memory of the head pod")
    option("--gpu-resource", default="nvidia.com/gpu", metavar="NAME", help="resource of GPUs")
    option("--resource", action="append", default=[], metavar="NAME=N",
           help="further resource of a worker pod, such as rdma/ib=8; may be repeated")  # fmt: skip
    option(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable; may be repeated",
    )
    option("--secret", action="append", default=[], metavar="NAME",
           help="secret whose keys become environment variables; may be repeated")  # fmt: skip
    option("--service-account", default="", metavar="NAME", help="service account of the pods")
    option("--node-selector", action="append", default=[], metavar="LABEL=VALUE",
           help="label of the nodes of worker pods; may be repeated")  # fmt: skip
    option("--toleration", action="append", default=[], metavar="KEY",
           help="taint that worker pods tolerate; may be repeated")  # fmt: skip
    option("--queue", default="", metavar="NAME", help="queue of Kueue, which admits the job")
    option("--ray-version", metavar="VERSION", help="Ray in the image (default: the version here)")
    option(
        "--retries", type=between(0, 1000), default=RETRIES, metavar="N", help="starts after the first one"
    )
    option("--start-limit", type=seconds, default=0, metavar="SECONDS",
           help="time until the run begins, queueing included; 0 for none")  # fmt: skip
    option("--keep", type=seconds, default=600, metavar="SECONDS", help="time for which ended pods are kept")
    add_output_options(parser, "kubectl apply")


def run(options: argparse.Namespace) -> int:
    config = launched_config(options.config, options.overrides)
    shape = shape_of(config, options.gpus_per_node)
    for name in ("mount", "folder"):
        path = getattr(options, name)
        if path is not None and not path.startswith("/"):
            raise ConfigError(f"--{name} {path} must be an absolute path in the pods, such as /shared")
    cpus = options.cpus_per_node or shape.default_cpus
    shared = options.shared_memory
    job = RayJob(
        name=kubernetes_name(options.job_name or config.run.name),
        namespace=options.namespace,
        image=options.image,
        ray_version=options.ray_version or version("ray"),
        shape=shape,
        arguments=train_arguments(options.config, options.overrides, "auto"),
        claim=options.claim,
        mount=options.mount,
        folder=options.folder or options.mount,
        head=PodSize(options.head_cpus, options.head_memory, shared),
        worker=PodSize(str(cpus), options.memory, shared, _pairs("--resource", options.resource, _quantity)),
        gpu_resource=options.gpu_resource,
        environment=_pairs("--env", options.env),
        secrets=options.secret,
        service_account=options.service_account,
        queue=options.queue,
        node_selector=_pairs("--node-selector", options.node_selector),
        tolerations=options.toleration,
        retries=options.retries,
        start_limit_s=options.start_limit,
        keep_s=options.keep,
    )
    text = manifest(job)
    note(f"{job.name}: {shape}, and a head")
    deliver(options, text, _apply)
    return 0


def _apply(text: str) -> None:
    command = ["kubectl", "apply", "--filename", "-"]
    note(run_program(command, text, "kubectl", "apply the manifest where kubectl is"))


def _quantity(text: str) -> str:
    """Return a quantity of Kubernetes unchanged; a `type=` for argparse."""
    if not QUANTITY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is not a quantity of Kubernetes; write a number, or one with a unit such as 64Gi"
        )
    return text


def _pairs(option: str, texts: Sequence[str], kind: Callable[[str], str] = str) -> dict[str, str]:
    """Return the values in `texts` by name."""
    found = dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(
                f"{option} {text!r} is not NAME=VALUE; write both, with an equals sign between them"
            )
        try:
            found[name] = kind(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{option} {text}: {error}") from None
    return found
