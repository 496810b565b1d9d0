"""Imported once by the forkserver: every rank starts with these modules loaded. Nothing here may start a thread."""

from __future__ import annotations

import importlib
import warnings

from hybridengine.importing import nothing_collected

# Without collection, ranks neither search the objects imported here nor copy their pages.
with warnings.catch_warnings(), nothing_collected():
    warnings.simplefilter("ignore")  # Megatron-core warns six times that there is no GPU

    import pytest  # noqa: F401  # a rank imports the module of the function that it runs, and that imports pytest
    import safetensors.torch  # noqa: F401
    import torch.distributed  # noqa: F401

    import tests.gloo.ranks
    import tests.gloo.sharded_ranks  # noqa: F401
    from hybridengine.families.registry import FAMILIES

    for family in FAMILIES:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
