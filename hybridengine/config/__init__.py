"""Configuration of a run: one YAML file plus `key=value` overrides, typed, frozen and validated as a whole."""

from hybridengine.config.algorithm import Role
from hybridengine.config.checks import check_run
from hybridengine.config.loading import load_config
from hybridengine.config.model_checks import holder_shape, model_shape
from hybridengine.config.row_checks import rows_for_every_rank
from hybridengine.config.run_config import ROLES, ModelHolder, RunConfig, model_holders

__all__ = [
    "ROLES",
    "ModelHolder",
    "Role",
    "RunConfig",
    "check_run",
    "holder_shape",
    "load_config",
    "model_holders",
    "model_shape",
    "rows_for_every_rank",
]
