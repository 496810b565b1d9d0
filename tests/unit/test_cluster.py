"""Starting Ray on this machine when Ray starts too late or not at all."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services, utils

from hybridengine.controller import cluster
from hybridengine.errors import ConfigError, WorkerError

pytestmark = pytest.mark.usefixtures("no_ray")
OTHER_LOOPBACK = "127.0.0.2"
"""Address in place of the node's, at which nobody listens who listens at 127.0.0.1."""


@pytest.mark.parametrize("num_late", [0, 2, 3])
def test_a_machine_too_busy_for_ray_gets_another_chance(monkeypatch: pytest.MonkeyPatch, num_late: int):
    """Ray raises a bare exception when its processes take more than 30 s."""
    calls: list[str] = []

    def init(**settings: Any) -> None:
        calls.append(settings["address"])
        if calls.count("local") <= num_late:
            raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    if num_late < cluster.START_ATTEMPTS:
        cluster.start_ray(num_cpus=1, num_gpus=0)
    else:
        with pytest.raises(WorkerError, match=r"has not started .*3 times over \(The current node timed out"):
            cluster.start_ray(num_cpus=1, num_gpus=0)
    assert calls.count("shutdown") == num_late
    assert calls.count("local") == min(num_late + 1, cluster.START_ATTEMPTS)


def test_sigterm_keeps_its_handler_while_ray_connects(monkeypatch: pytest.MonkeyPatch):
    """`ray.init` sets one that calls sys.exit(15)."""
    seen = []

    def init(**settings: Any) -> None:
        utils.set_sigterm_handler(lambda number, frame: sys.exit(number))
        seen.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    cluster.start_ray(num_cpus=1, num_gpus=0)
    assert seen == [before] and signal.getsignal(signal.SIGTERM) is before


def test_an_address_where_nobody_answers_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    """Ray itself would retry for minutes."""
    monkeypatch.setattr(ray, "init", lambda **settings: pytest.fail("it was not looked at before"))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it never listens: the port refuses, and nobody else can take it
        for address in (f"127.0.0.1:{silent.getsockname()[1]}", "127.0.0.1:99999"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with pytest.raises(
                ConfigError, match=rf"no Ray cluster answers at '{address}' \(.*\); start one with"
            ):
                cluster.start_ray()


@pytest.mark.parametrize("address", ["ray://head:10001", "local"])
def test_other_addresses_are_left_to_ray(address: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", lambda **settings: seen.append(settings["address"]))
    cluster.start_ray()
    assert seen == [address]


@pytest.mark.parametrize("listens", [True, False])
def test_auto_is_the_cluster_of_the_last_ray_start_if_it_answers(
    listens: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Ray leaves its file behind where it is killed."""
    seen: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **settings: seen.append(settings["address"]))
    monkeypatch.setattr(services, "find_gcs_addresses", set[str])  # others of this machine
    monkeypatch.setattr(services, "get_node_ip_address", lambda *_: OTHER_LOOPBACK)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.socket() as server:
        server.bind((OTHER_LOOPBACK, 0))
        if listens:
            server.listen()
        found = f"{OTHER_LOOPBACK}:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(found)
        if listens:
            cluster.start_ray()
            assert seen == ["auto"]
        else:
            with pytest.raises(
                ConfigError, match=rf"at 'auto' \({found}: .*refused\); start one with `ray start"
            ):
                cluster.start_ray()
            assert not seen


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:{}", "localhost:{}"])
def test_the_ray_of_a_run_on_this_machine_is_no_cluster_to_join(
    address: str, monkeypatch: pytest.MonkeyPatch
):
    """It is at loopback alone, in place of which Ray would try the node's address for minutes."""
    monkeypatch.setattr(ray, "init", lambda **settings: pytest.fail("it was not looked at before"))
    monkeypatch.setattr(services, "get_node_ip_address", lambda *_: OTHER_LOOPBACK)
    with socket.create_server(("127.0.0.1", 0)) as local:
        port = local.getsockname()[1]
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: {f"127.0.0.1:{port}"})
        monkeypatch.setenv("RAY_ADDRESS", address.format(port))
        with pytest.raises(ConfigError, match=rf"\({OTHER_LOOPBACK}:{port}: .*refused\)"):
            cluster.start_ray()
