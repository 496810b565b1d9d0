"""Conversion between checkpoints of Hugging Face and of runs: the same bits both ways, in files of any size."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridengine.checkpoints.conversion import import_model
from hybridengine.checkpoints.folders import checkpoint_at
from hybridengine.checkpoints.hf_files import HfWriter
from hybridengine.checkpoints.tensors import TensorFolder
from hybridengine.cli.main import main
from hybridengine.models.checkpoint_files import check_checkpoint
from hybridengine.reshard.boxes import full_box
from tests.gloo.tiny_models import write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "source"
    write_model(folder, "qwen2", tied=False)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("# A model")
    return folder


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    return import_model(source, source.parent / "converted", dtype="float32").folder


@pytest.fixture
def start(converted: Path, tmp_path: Path) -> Path:
    """Return a checkpoint that the test may change."""
    return shutil.copytree(converted, tmp_path / "start")


def bits(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("most", ["4GiB", "40KiB", "1"])
def test_there_and_back_is_bitwise_the_same(most: str, source: Path, tmp_path: Path) -> None:
    start, back = tmp_path / "start", tmp_path / "back"
    assert main(["convert", str(source), str(start)]) == 0
    assert main(["convert", str(start), str(back), "--companions", str(source), "--max-file", most]) == 0
    before, after = bits(source), bits(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    files = list(back.glob("*.safetensors"))
    if most == "4GiB":
        assert [file.name for file in files] == ["model.safetensors"]
        assert files[0].read_bytes()[8:].startswith(b'{"__metadata__":{"format":"pt"}')
    else:
        index = json.loads((back / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(one.numel() * 4 for one in before.values())
        assert set(index["weight_map"]) == set(before) and set(index["weight_map"].values()) == {
            f.name for f in files
        }
        assert len(files) == (len(before) if most == "1" else len(files))
        limit = max(40 * 1024, max(one.numel() * 4 for one in before.values())) + 4096
        assert all(file.stat().st_size < limit for file in files)
    for name in ("config.json", "tokenizer.json", "README.md"):
        assert (back / name).read_text() == (source / name).read_text()
    one, other = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, back))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(one(tokens).logits, other(tokens).logits)


def test_another_type_is_rounded_once(source: Path, tmp_path: Path) -> None:
    assert main(["convert", str(source), str(tmp_path / "start"), "--dtype", "bfloat16"]) == 0
    stored = TensorFolder(tmp_path / "start" / "actor")
    for name, tensor in bits(source).items():
        found = stored.read(f"weights.{name}", full_box(tuple(tensor.shape)))
        assert found.dtype == torch.bfloat16 and torch.equal(found, tensor.bfloat16())
    back = ["convert", str(tmp_path / "start"), str(tmp_path / "back"), "--companions", str(source)]
    assert main(back) == 0
    assert json.loads((source / "config.json").read_text())["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.bfloat16


def test_boxes_are_read_from_the_parts_that_hold_them(source: Path, converted: Path) -> None:
    checkpoint = checkpoint_at(converted)
    checkpoint.check()
    assert checkpoint.step == 0
    stored = TensorFolder(checkpoint.folder / "actor")
    name = "model.embed_tokens.weight"
    whole = bits(source)[name]
    assert torch.equal(stored.read(f"weights.{name}", ((5, 9), (3, 17))), whole[5:9, 3:17])


REFUSED = {
    "nothing there": (["nowhere", "out"], "SOURCE nowhere has neither manifest.json nor config.json"),
    "exists": (["{source}", "{source}"], "exists; name a folder that does not"),
    "no parent": (["{source}", "{tmp}/a/b"], "there is no folder"),
    "no folder can be made": (["{source}", "/proc/out"], "/proc/out cannot be made ("),
    "type": (["{source}", "{tmp}/out", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
    "size": (["{source}", "{tmp}/out", "--max-file", "much"], "--max-file"),
    "role": (["{start}", "{tmp}/out", "--role", "critic"], "has no role critic; choose from actor"),
    "companions": (["{start}", "{tmp}/out"], "has no config.json; give --companions"),
    "no role": (
        ["{source}", "{tmp}/out", "--role", "../../actr"],
        "--role: invalid choice: '../../actr'",
    ),
    "damaged": (
        ["{damaged}", "{tmp}/out", "--companions", "{source}"],
        "/damaged cannot be used: actor/",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_error_and_writes_nothing(
    name: str,
    source: Path,
    converted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    damaged = shutil.copytree(converted, tmp_path / "damaged")
    file = next((damaged / "actor").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    arguments, text = REFUSED[name]
    places = {"source": source, "tmp": tmp_path, "start": converted, "damaged": damaged}
    before = sorted(tmp_path.rglob("*"))
    assert main(["convert", *(one.format(**places) for one in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and text in err and err.count("hybridengine: ") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("where", ["before", "within", "after"])
def test_an_export_that_fails_leaves_nothing(where: str, tmp_path: Path) -> None:
    """It fails before, while or after tensors are written: an unknown type, an interruption, a taken name."""

    def export() -> None:
        with HfWriter(tmp_path / "model", {"a": (2, 3)}, dtype, 100) as writer:
            writer.write("a", torch.ones(2, 3))
            if where == "within":
                raise InterruptedError

    dtype = torch.float64 if where == "before" else torch.float32
    if where == "after":
        (tmp_path / "model").touch()
    expected = {"before": KeyError, "within": InterruptedError, "after": NotADirectoryError}
    with pytest.raises(expected[where]):
        export()
    assert [one.name for one in tmp_path.iterdir()] == (["model"] if where == "after" else [])


def test_a_critic_is_described_as_what_it_is(tmp_path: Path) -> None:
    """Its companion files come from the policy, whose configuration describes a language model."""
    write_model(tmp_path / "policy", "qwen2", tied=False)
    write_model(tmp_path / "critic", "qwen2", tied=False, num_labels=1)
    assert main(["convert", str(tmp_path / "critic"), str(tmp_path / "start"), "--role", "critic"]) == 0
    command = ["convert", str(tmp_path / "start"), str(tmp_path / "back"), "--role", "critic"]
    assert main([*command, "--companions", str(tmp_path / "policy")]) == 0
    assert check_checkpoint(tmp_path / "back").num_labels == 1
    before, after = bits(tmp_path / "critic"), bits(tmp_path / "back")
    assert all(torch.equal(before[name], after[name]) for name in before)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    assert model.config.num_labels == 1
    assert torch.equal(model.score.weight, before["score.weight"])
    assert main(["convert", str(tmp_path / "back"), str(tmp_path / "again"), "--role", "critic"]) == 0


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            None,
            "is of another model: model.embed_tokens.weight is [131, 32] there and [131, 64] in the checkpoint",
        ),
        ("{", "config.json"),
        ("[]", "config.json"),
    ],
)
def test_companions_of_another_model_are_refused(
    config: str | None, text: str, converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    write_model(other, "qwen2", tied=False, hidden_size=32)
    if config is not None:
        (other / "config.json").write_text(config)
    capsys.readouterr()
    command = ["convert", str(converted), str(tmp_path / "back"), "--companions", str(other)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(("num_labels", "role"), [(0, "critic"), (0, "cost_critic"), (1, "actor")])
def test_a_model_without_the_head_of_its_role_is_refused(
    num_labels: int, role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model", "qwen2", tied=False, num_labels=num_labels)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "start"), "--role", role]) == 2
    has, needs = ("a score head", "none") if num_labels else ("no score head", "one")
    assert f"has {has}, and --role {role} needs {needs}" in capsys.readouterr().err
    assert not (tmp_path / "start").exists()


def test_bytes_that_are_no_tensor_are_an_error_that_says_where(
    source: Path, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The digests match: the checkpoint was written with these bytes."""
    file, manifest = start / "actor" / "__0_0.distcp", start / "manifest.json"
    file.write_bytes(bytes(file.stat().st_size))
    told = json.loads(manifest.read_text())
    told["files"]["actor/__0_0.distcp"] = [file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()]
    manifest.write_text(json.dumps(told))
    capsys.readouterr()
    assert main(["convert", str(start), str(tmp_path / "back"), "--companions", str(source)]) == 2
    assert re.search(
        r"__0_0\.distcp has no tensor at byte \d+ \(.*\); use a complete", capsys.readouterr().err
    )
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(("back", "size"), [(False, 600), (False, 10_000), (True, 10_000)])
def test_a_full_disk_is_one_error_and_leaves_nothing(
    back: bool, size: int, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "start"
    if back:
        assert main(["convert", str(source), str(start)]) == 0
    there = str(start) if back else str(source)
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        status = main(
            ["convert", there, str(tmp_path / "out"), *(["--companions", str(source)] if back else [])]
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert status == 1 and "Traceback" not in error
    assert f"{tmp_path / 'out'} cannot be written (File too large); make room" in error
    assert sorted(tmp_path.iterdir()) == before


def test_an_expert_bias_stays_in_float32(tmp_path: Path) -> None:
    bias = torch.tensor([12.001, 12.002])  # the same number in bfloat16
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    with HfWriter(tmp_path / "model", {"a": (2,), name: (2,)}, torch.bfloat16, 100) as writer:
        writer.write("a", torch.ones(2))
        writer.write(name, bias)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored["a"].dtype == torch.bfloat16
    assert torch.equal(stored[name], bias)
