"""Manifests of `launch kuberay` satisfy KubeRay's schema and ask for what the configuration needs."""

from __future__ import annotations

import gzip
import json
import shlex
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hybridengine.cli.main import main
from hybridengine.launch.kuberay import MAX_NAME, kubernetes_name

SCHEMA = Path(__file__).with_name("kuberay") / "rayjob.schema.json.gz"
NEEDED = ["--image", "team/hybridengine:1", "--claim", "lustre"]


def strict(schema: Any) -> Any:
    """Return a schema of Kubernetes that refuses unknown fields, as `kubectl create` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        found["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft4Validator:
    schema = strict(json.loads(gzip.decompress(SCHEMA.read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft4Validator(schema)


def rendered(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["launch", "kuberay", *arguments]) == 0
    return yaml.safe_load(capfd.readouterr().out)


@pytest.mark.parametrize(
    ("config", "replicas", "ranks"),
    [
        ("llama3-70b-16nodes", 16, 8),
        ("qwen3-235b", 32, 8),
        ("async-70b", 16, 8),
        ("arithmetic", 1, 4),
        ("async-grpo", 2, 2),
    ],
)
def test_a_manifest_is_valid_and_has_a_pod_for_each_node(
    config: str,
    replicas: int,
    ranks: int,
    capfd: pytest.CaptureFixture[str],
    validator: jsonschema.Draft4Validator,
):
    job = rendered(capfd, f"configs/{config}.yaml", *NEEDED)
    validator.validate(job)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [group["replicas"], group["minReplicas"], group["maxReplicas"]] == [replicas] * 3
    resources = group["template"]["spec"]["containers"][0]["resources"]
    on_gpus = ranks == 8
    assert resources["limits"] == resources["requests"]
    assert resources["limits"].get("nvidia.com/gpu") == (str(ranks) if on_gpus else None)
    assert Fraction(resources["limits"]["cpu"]) >= ranks
    entrypoint = shlex.split(job["spec"]["entrypoint"])
    assert entrypoint == [
        "hybridengine",
        "train",
        f"configs/{config}.yaml",
        "resume=auto",
        "cluster.address=auto",
    ]


def test_every_option_is_valid(capfd: pytest.CaptureFixture[str], validator: jsonschema.Draft4Validator):
    job = rendered(
        capfd,
        "configs/llama3-70b-16nodes.yaml",
        "run.name=My_Run.7",
        "actor.parallel=4-8-4 c=1",
        *NEEDED,
        *("--namespace", "rl", "--mount", "/lustre", "--folder", "/lustre/rl", "--cpus-per-node", "96"),
        *("--memory", "1500Gi", "--shared-memory", "256Gi", "--head-cpus", "16", "--head-memory", "128Gi"),
        *("--gpu-resource", "amd.com/gpu", "--resource", "rdma/ib=8", "--capability", "IPC_LOCK"),
        *("--env", "A=b=c", "--secret", "wandb"),
        *("--service-account", "trainer", "--node-selector", "gpu=h100", "--node-selector"),
        *("node-role.kubernetes.io/trainer=", "--toleration", "gpu"),
        *(
            "--queue",
            "team-a",
            "--ray-version",
            "2.59.0",
            "--retries",
            "7",
            "--start-limit",
            "3600",
            "--keep",
            "60",
        ),
    )
    validator.validate(job)
    spec = job["spec"]
    assert job["metadata"] == {
        "name": "my-run-7",
        "namespace": "rl",
        "labels": {"kueue.x-k8s.io/queue-name": "team-a"},
    }
    assert (spec["suspend"], spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (True, 7, 60)
    assert spec["preRunningDeadlineSeconds"] == 3600
    assert shlex.split(spec["entrypoint"])[3:5] == ["run.name=My_Run.7", "actor.parallel=4-8-4 c=1"]
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == "2.59.0" and cluster["authOptions"] == {"mode": "token"}
    head, worker = (
        one["template"]["spec"] for one in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0])
    )
    assert head["containers"][0]["resources"]["limits"] == {"cpu": "16", "memory": "128Gi"}
    assert worker["containers"][0]["resources"]["limits"] == {
        "cpu": "96",
        "memory": "1500Gi",
        "rdma/ib": "8",
        "amd.com/gpu": "8",
    }
    assert worker["nodeSelector"] == {"gpu": "h100", "node-role.kubernetes.io/trainer": ""}
    assert worker["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert "nodeSelector" not in head
    assert worker["containers"][0]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert "securityContext" not in head["containers"][0]
    for pod, shared in ((head, "128Gi"), (worker, "256Gi")):
        container = pod["containers"][0]
        assert container["workingDir"] == "/lustre/rl"
        assert {"name": "A", "value": "b=c"} in container["env"]
        assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/lustre"]]["persistentVolumeClaim"] == {"claimName": "lustre"}
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": shared}
        assert pod["serviceAccountName"] == "trainer"


def test_nodes_with_other_numbers_of_ranks_are_another_group(
    capfd: pytest.CaptureFixture[str], validator: jsonschema.Draft4Validator
):
    job = rendered(
        capfd, "configs/arithmetic.yaml", "cluster.ranks_per_node=[1,2,1]", "--gpus-per-node", "2", *NEEDED
    )
    validator.validate(job)
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    asked = {
        group["replicas"]: group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for group in groups
    }
    assert asked == {1: "2", 2: "1"}
    assert len({group["groupName"] for group in groups}) == 2


def test_ranks_are_on_worker_pods_alone(capfd: pytest.CaptureFixture[str]):
    """Ray counts the CPUs of a pod by itself: those of the head would be taken for ranks."""
    spec = rendered(capfd, "configs/async-grpo.yaml", *NEEDED, "--env", "NCCL_DEBUG=INFO")["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    cluster = spec["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert (workers["rayStartParams"], workers["replicas"]) == ({"num-cpus": "2"}, 2)
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        variables = {one["name"]: one["value"] for one in container["env"]}
        assert variables["NCCL_DEBUG"] == "INFO" and variables["RAY_USAGE_STATS_ENABLED"] == "0"


def test_pods_of_several_pools_are_equal(capfd: pytest.CaptureFixture[str]):
    """Kubernetes chooses their addresses, by which pools choose: in most orders a pod with fewer GPUs fits no pool."""
    pools = (
        "{a: {roles: [critic], ranks_per_node: [1]}, b: {roles: [reference, reward], ranks_per_node: [2,2]}}"
    )
    changes = ["cluster.ranks_per_node=[2]", f"cluster.pools={pools}", "cluster.device=cuda"]
    sizes = ["actor.parallel=1-1-2", "critic.parallel=1-1-1", "reference.parallel=1-1-4"]
    job = rendered(capfd, "configs/arithmetic.yaml", *changes, *sizes, *NEEDED)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (group["replicas"], limits["nvidia.com/gpu"]) == (4, "2")


def test_the_schema_refuses_what_kuberay_does_not_know(
    capfd: pytest.CaptureFixture[str], validator: jsonschema.Draft4Validator
):
    for change in ({"entryPoint": "x"}, {"backoffLimit": "5"}, {"suspend": 1}):
        job = rendered(capfd, "configs/arithmetic.yaml", *NEEDED)
        job["spec"] |= change
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(job)


@pytest.mark.parametrize(
    ("text", "name"),
    [("llama3_70B", "llama3-70b"), ("7b", "run-7b"), ("--a--", "a"), ("x" * 99, "x" * MAX_NAME)],
)
def test_names_of_runs_become_names_of_kubernetes(text: str, name: str):
    assert kubernetes_name(text) == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1TB"], "'1TB' is not a quantity of Kubernetes; write a number, or one with a unit"),
        (["--mount", "shared"], "--mount shared must be an absolute path in the pods, such as /shared"),
        (["--env", "HOME"], "--env 'HOME' is not NAME=VALUE; write both"),
        (["--resource", "rdma/ib=many"], "--resource rdma/ib=many: 'many' is not a quantity"),
        (["--job-name", "ツ"], "'ツ' has no ASCII letter or digit for the name of a RayJob"),
        (["--folder", "/other"], "--folder /other is not below --mount /shared, the volume that all pods"),
        (["--folder", "/shared/../x"], "--folder /shared/../x is not below --mount /shared"),
        (["--memory", "1Gi", "--shared-memory", "1Ti"], "--shared-memory 1Ti is not less than --memory 1Gi"),
        (
            ["--memory", "64G", "--shared-memory", "64Gi"],
            "--shared-memory 64Gi is not less than --memory 64G",
        ),
        (["--claim", "UPPER_bad name"], "'UPPER_bad name' is not a name of Kubernetes"),
        (["--namespace", "Bad NS"], "'Bad NS' is not a namespace of Kubernetes"),
        (["--namespace", "a" * 64], "is not a namespace of Kubernetes: at most 63 of a-z, 0-9 and -"),
        (["run.folder=/tmp/runs"], "run.folder=/tmp/runs is not below --mount /shared, the volume"),
        (["run.folder=../runs"], "run.folder=../runs is not below --mount /shared, the volume"),
        (["--image", "bad image"], "'bad image' is not an image"),
        (["--toleration", "bad key"], "'bad key' is not the key of a taint, such as nvidia.com/gpu"),
        (["--toleration", "a//b"], "'a//b' is not the key of a taint"),
        (["--env", "1A=2"], "--env 1A=2: '1A' is not the name of a variable"),
        (["--resource", "rdma ib=1"], "--resource rdma ib=1: 'rdma ib' is not a resource with its domain"),
        (["--resource", "cpu=1"], "'cpu' is not a resource with its domain"),  # --cpus-per-node
        (["--resource", "rdma/ib=0"], "--resource rdma/ib=0: '0' must be more than 0"),
        (["--node-selector", "a b=c"], "--node-selector a b=c: 'a b' is not the key of a label"),
        (["--node-selector", "a=b c"], "--node-selector a=b c: 'b c' is not the value of a label"),
        (["--mount", "/usr/lib"], "--mount /usr/lib would replace a folder of the pod's system"),
        (["--resource", "nvidia.com/gpu=3"], "--resource nvidia.com/gpu is set by this command"),
        (["--mount", "/"], "--mount / would replace a folder of the pod's system"),
        (["--mount", "/x/../dev/shm"], "--mount /x/../dev/shm would replace a folder of the pod's system"),
        (["--mount", "/a:b"], "--mount /a:b would replace a folder of the pod's system, or has a colon"),
        (["--head-cpus", "0"], "argument --head-cpus: '0' must be more than 0"),
        (["--gpu-resource", ""], "argument --gpu-resource: '' is not a resource with its domain"),
        (["--claim", ""], "argument --claim: '' is not a name of Kubernetes"),
        (["--ray-version", "2.40.0"], "'2.40.0' must be a version of Ray from 2.52.0, which has tokens"),
        (["--env", "RAY_AUTH_MODE=disabled"], "--env RAY_AUTH_MODE is set by KubeRay"),
        (["resume=never"], "a launched run has resume=auto, so that a new attempt continues the earlier one"),
        (["cluster.address=1.2.3.4:1"], "a launch starts the cluster that the run joins; leave it out"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]):
    status = main(["launch", "kuberay", "configs/arithmetic.yaml", *NEEDED, *arguments])
    assert status == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("folder", ["../runs", "/shared/runs"])
def test_a_run_may_write_anywhere_on_the_volume(folder: str, capfd: pytest.CaptureFixture[str]):
    rendered(capfd, "configs/arithmetic.yaml", *NEEDED, "--folder", "/shared/code", f"run.folder={folder}")


def test_submitting_needs_kubectl(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "kuberay", "configs/arithmetic.yaml", *NEEDED, "--submit"]) == 2
    assert (
        "kubectl is not installed on this machine; create the job where kubectl is" in capfd.readouterr().err
    )


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `kubectl` into PATH that knows the names of jobs in a file, and return the file."""
    jobs = tmp_path / "jobs"
    jobs.write_text("")
    program = tmp_path / "kubectl"
    program.write_text(f"""#!/bin/bash
[ "$*" = "create --filename -" ] || {{ echo "unknown: $*" >&2; exit 3; }}
name=$(sed -n 's/^  name: //p')
grep -qx "$name" {jobs} && {{ echo "Error from server (AlreadyExists): \\"$name\\" already exists" >&2; exit 1; }}
echo "$name" >> {jobs}
echo "rayjob.ray.io/$name created"
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return jobs


def test_a_job_is_not_submitted_over_one_of_the_same_name(capfd: pytest.CaptureFixture[str], kubectl: Path):
    """KubeRay starts nothing where a manifest is applied to a job that has ended."""
    command = ["launch", "kuberay", "configs/arithmetic.yaml", *NEEDED, "--namespace", "rl", "--submit"]
    assert main(command) == 0
    assert "launch: rayjob.ray.io/arithmetic created" in capfd.readouterr().err
    assert main(command) == 2
    assert (
        "namespace rl has a RayJob arithmetic already, of an earlier or of another run; delete it with"
        " `kubectl delete rayjob arithmetic --namespace rl`"
    ) in capfd.readouterr().err
    assert main([*command, "--job-name", "again"]) == 0
    assert kubectl.read_text().split() == ["arithmetic", "again"]
