"""What the runs over hosts are compared with."""

from __future__ import annotations

import pytest

from tests.machines.faults import Left, train_undisturbed


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_ray: dict[str, str]) -> Left:
    """Return what the run of the tests of faults leaves on one machine, without a fault."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), warm_ray)
