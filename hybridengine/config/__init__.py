"""Configuration of a run: one YAML file plus `key=value` overrides, typed, frozen, checked as a whole."""

from hybridengine.config.algorithm_sections import Role
from hybridengine.config.checks import check_run, model_shape
from hybridengine.config.loading import load_config
from hybridengine.config.run_config import ROLES, RunConfig

__all__ = ["ROLES", "Role", "RunConfig", "check_run", "load_config", "model_shape"]
