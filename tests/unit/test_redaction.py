"""Secrets in names, in the environment and in addresses are removed; everything else stays."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, create_model

from hybridengine.cli.main import main
from hybridengine.config import load_config
from hybridengine.config.algorithm import Algorithm
from hybridengine.config.values import Section
from hybridengine.controller.failures import failure_of
from hybridengine.redaction import is_secret, redacted, without_secrets
from hybridengine.training.files import claim_run, config_text, keep_config
from hybridengine.training.resuming import resume_command
from hybridengine.training.saving import Progress, run_state

SECRET = "sk-0123456789"


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apikey",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "MLFLOW_TRACKING_PASSWORD",
        "client.secret",
        "openaiApiKey",
        "PGPASSWORD",
        "accessToken",
        "access_tokens",
        "Authorization",
        "credentials",
        "judge_dsn",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "stop_token",
        "eos_token",
        "padTokens",
        "max_prompt_tokens_in",
        "max_prompt_tokens",
        "micro_batch_tokens",
        "cache_tokens",
        "label_key",
        "key",
        "path",
        "secretary",
        "author",
        "KEYBOARD",
        "PWD",
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("name", ["DB_PASS", "JUDGE_PWD", "GITHUB_PAT", "SENTRY_DSN", "OPENAI_KEY"])
def test_names_that_only_the_environment_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    assert without_secrets(f"{name}={SECRET}") == f"{name}=(hidden: {name})"
    assert not is_secret("first_pass")


HEADERS = [
    ("Authorization: Bearer {}", "Authorization: "),
    ("{{'authorization': 'Basic {}'}}", "'authorization': '"),
    (r"{{\"Authorization\": \"token {}\"}}", "Authorization"),
    ("(b'Authorization', b'ApiKey {}')", "(b'Authorization', b'"),
    ("Authorization={}", "Authorization="),
    ("x-api-key: {}", "x-api-key: "),
    ("bearer sk-0123456789{}", "bearer "),
    ("https://judge/v1?model=a&api_key={}&n=1", "https://judge/v1?model=a&api_key=(hidden)&n=1"),
    ("GET /v1?token={} HTTP/1.1", "GET /v1?token=(hidden) HTTP/1.1"),
]


@pytest.mark.parametrize(("header", "kept"), HEADERS)
def test_headers_with_credentials(header: str, kept: str) -> None:
    found = without_secrets(header.format(SECRET))
    assert kept in found and "(hidden)" in found and SECRET not in found
    for text in ("authorization is asked for", "without authorization, nothing is sent", "a bearer of news"):
        assert without_secrets(text) == text


def test_values_of_the_environment_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    monkeypatch.setenv("JUDGE_TOKEN", f"{SECRET}-longer")
    monkeypatch.setenv("PIN_TOKEN", "123")
    monkeypatch.setenv("OPENAI_KEY", "of-another-service")
    assert without_secrets(f"GET /?key={SECRET} 123") == "GET /?key=(hidden: JUDGE_API_KEY) 123"
    assert without_secrets("of-another-service") == "(hidden: OPENAI_KEY)"
    assert without_secrets(f"{SECRET}-longer") == "(hidden: JUDGE_TOKEN)"
    assert redacted({"a": [f"Bearer {SECRET}", 3]}) == {"a": ["Bearer (hidden: JUDGE_API_KEY)", 3]}


@pytest.mark.parametrize("kind", [str, str | None, dict[str, str], Any])
def test_a_key_that_is_a_secret_by_its_name_must_be_declared_as_one(kind: Any) -> None:
    with pytest.raises(
        TypeError, match=r"judge_api_key is a secret by its name; declare it as pydantic\.SecretStr"
    ):
        create_model("Asked", __base__=Section, judge_api_key=(kind, None))


def test_a_key_that_counts_may_have_a_secrets_name() -> None:
    create_model("Counted", __base__=Section, max_tokens=(int, 3), use_password=(bool, True))


def test_addresses() -> None:
    assert without_secrets("at https://me:p@ss/w@host:5000/x") == "at https://(hidden)@host:5000/x"
    assert (
        without_secrets("no answer from https://me:pass@host:5000/x")
        == "no answer from https://(hidden)@host:5000/x"
    )
    assert without_secrets("ray://host:10001 and a@b.c") == "ray://host:10001 and a@b.c"


def test_failures_of_ranks_carry_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    try:
        raise ValueError(f"401 for {SECRET}")
    except ValueError as error:
        failure = failure_of(0, error)
    assert SECRET not in failure.error + failure.traceback
    assert "401 for (hidden: JUDGE_API_KEY)" in failure.traceback


def test_of_a_very_long_exception_both_ends_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may print a tensor there. All of the reported text is searched for secrets, some seconds per megabyte."""
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    words = f"{SECRET} begin " + f"{SECRET} " * 20_000 + f"end {SECRET}"
    failure = failure_of(0, ValueError(words))
    for text in (failure.error, failure.traceback):
        assert "ValueError: (hidden: JUDGE_API_KEY) begin" in text and "end (hidden: JUDGE_API_KEY)" in text
        assert re.search(r" \.\.\. \(28\d{4} characters\) \.\.\. ", text)
        assert SECRET[:5] not in text, "none is cut in two either"


def test_an_exception_that_cannot_say_what_it_is_keeps_its_class() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert failure_of(0, MuteError()).error == "MuteError: <exception str() failed>"


class Asking(Algorithm):
    """A user-defined algorithm with a key."""

    roles = ("actor", "reward")
    api_key: SecretStr = SecretStr("")
    other_keys: dict[str, SecretStr] = {}  # noqa: RUF012

    def step(self, roles, sampling, state):
        return {}


CONFIG = """
model: {hf_config: qwen2.5-7b, path: models/none}
data: {train_file: none.jsonl}
reward: {function: "judge:ask"}
algorithm: {name: "tests.unit.test_redaction:Asking", api_key: "${oc.env:JUDGE_API_KEY}"}
"""


def test_a_configuration_that_is_written_down_has_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    config = load_config(file, [], dry_run=True)
    assert config.algorithm == Asking(api_key=SecretStr(SECRET))  # the dataflow needs it
    for written in (
        config_text(config),
        run_state(config, Progress(), []).model_dump_json(),
        str(config.described()),  # for trackers
        repr(config),
    ):
        assert SECRET not in written and "api_key" in written
    assert config.described()["data"]["train_file"] == "none.jsonl"
    claimed, _ = claim_run(load_config(file, [f"run.folder={tmp_path}"], dry_run=True))
    assert claimed.algorithm == config.algorithm and claimed.model.path == str(Path("models/none").resolve())
    keep_config(claimed)
    assert resume_command(claimed).startswith("the same command"), "the file has a mask where the secret was"
    assert main(["train", str(file), f"run.name=a/{SECRET}"]) == 2
    assert SECRET not in capsys.readouterr().err
    for value in ("12345678", "[12345678", "{a: 12345678}"):
        assert main(["train", str(file), f"algorithm.api_key={value}"]) == 2
        error = capsys.readouterr().err
        assert "(hidden)" in error and "12345678" not in error
    monkeypatch.delenv("JUDGE_API_KEY")
    other = "given-on-the-command-line"
    assert main(["train", "configs/arithmetic.yaml", f"algorithm.api_key={other}"]) == 2
    error = capsys.readouterr().err
    assert "algorithm.api_key" in error and other not in error


def test_who_is_sent_a_configuration_keeps_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks receive it this way: their environment contains no secret."""
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("${oc.env:JUDGE_API_KEY}", f"{SECRET}-literal"))
    config = load_config(file, ["algorithm.other_keys.judge=another-key"], dry_run=True)
    monkeypatch.setattr("hybridengine.redaction._known", set())
    assert without_secrets(f"401 for {SECRET}-literal") == f"401 for {SECRET}-literal"
    sent = pickle.loads(pickle.dumps(config))
    assert sent == config
    assert without_secrets(f"401 for {SECRET}-literal, another-key") == "401 for (hidden), (hidden)"


def test_an_exception_that_nobody_expects_shows_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"refused {SECRET}")

    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    monkeypatch.setattr("hybridengine.cli.train.load_config", fail)
    assert main(["train", "configs/arithmetic.yaml"]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("Traceback") and "refused (hidden: JUDGE_API_KEY)" in error and SECRET not in error
    )
