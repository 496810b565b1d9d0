"""Choice of Megatron's layer spec. There is no GPU and no Transformer Engine: patches stand in for both answers."""

from __future__ import annotations

from unittest import mock

import pytest

from hybridengine.backends.megatron import model
from hybridengine.families.family import NameSet


@pytest.mark.parametrize(
    ("has_te", "on_cpu", "expected"),
    [
        (True, False, NameSet.TRANSFORMER_ENGINE),
        (True, True, NameSet.LOCAL),
        (False, False, NameSet.LOCAL),
        (False, True, NameSet.LOCAL),
    ],
)
def test_transformer_engine_needs_a_gpu(has_te: bool, on_cpu: bool, expected: NameSet) -> None:
    with mock.patch.multiple(model, HAVE_TE=has_te, is_needed=lambda: on_cpu):
        assert model.available_names() is expected
