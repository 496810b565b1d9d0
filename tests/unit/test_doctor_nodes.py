"""Nodes that the doctor examines: those on which a run places ranks."""

from __future__ import annotations

from hybridengine.controller.cluster import NodeOffer, place_pools
from hybridengine.doctor.examination import nodes_of_run


def test_ranks_go_to_nodes_as_runs_place_them() -> None:
    offers = [NodeOffer("a", 4, 0), NodeOffer("b", 8, 0)]
    places, misfits = place_pools({"main": (4, 4), "critic": (2,)}, offers, False)
    assert places == {"main": ["a"] * 4 + ["b"] * 4, "critic": ["b"] * 2} and not misfits
    assert place_pools({}, offers, False) == ({}, [])
    _, misfits = place_pools({"main": (4, 4), "critic": (6,)}, offers, False)
    assert misfits[0].startswith(
        "no nodes with room are left for pool 'critic' with ranks_per_node=[6]: the run wants 14 ranks, and the cluster"
        " has room for 12: a with 4 CPUs and 0 GPUs; b with 8 CPUs and 0 GPUs; "
    )
    _, misfits = place_pools({"main": (9,)}, offers, False)
    assert misfits[0].startswith("ranks_per_node=[9] needs 9 ranks on 1 nodes")


def test_engines_are_placed_one_by_one_and_judged_together() -> None:
    offers = [NodeOffer(name, 2, 0) for name in "abc"]
    pools = {"main": (2,), "engines.0": (1,), "engines.1": (1,)}
    places, misfits = place_pools(pools, offers, False)
    assert (places, misfits) == ({"main": ["a"] * 2, "engines": ["b"] * 2}, [])
    places, misfits = place_pools({**pools, "critic": (1, 1)}, offers, False)
    assert places == {"main": ["a"] * 2, "critic": ["b", "c"], "engines": ["b", "c"]} and not misfits
    places, (misfit,) = place_pools({**pools, "engines.2": (2,), "critic": (1,)}, offers, False)
    assert (
        misfit.startswith("no nodes with room are left for pool 'critic' with ranks_per_node=[1]: ")
        and "engines" in places
    )
    places, (misfit,) = place_pools({**pools, "engines.2": (2, 2)}, offers, False)
    assert misfit.startswith(
        "no nodes with room are left for engine 2 of pool 'engines' with ranks_per_node=[2, 2]: "
    )
    assert "engines" not in places
    _, (misfit,) = place_pools({f"engines.{number}": (2,) for number in range(9)}, offers, False)
    assert "engine 6 of pool 'engines' with ranks_per_node=[2] and 2 more: the run wants 18 ranks" in misfit


def test_nodes_without_ranks_of_the_run_are_not_examined() -> None:
    """Their faults keep no run from working; the controller is on this machine."""
    offers = [NodeOffer("head", 0, 0), NodeOffer("a", 4, 0), NodeOffer("b", 4, 0), NodeOffer("spare", 4, 0)]
    places, _ = place_pools({"main": (4,), "critic": (4,)}, offers, False)
    examined, spare = nodes_of_run(offers, "head", places)
    assert ([one.address for one in examined], spare) == (["head", "a", "b"], ["spare"])
    assert nodes_of_run(offers, "spare", places)[1] == ["head"]
    assert nodes_of_run(offers, "head", {}) == (offers, []), "without a configuration, all are"
