"""Hardware as data: a cluster's nodes, devices and links, read from a YAML file that is checked as a whole.

The files are in configs/clusters/. All figures are per direction; a link that is sold by its sum of both directions, as
NVLink is, has half of it.
"""

from __future__ import annotations

import difflib
import io
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, model_validator

from hybridengine.config.loading import known_fields
from hybridengine.config.values import Bytes, Section, Share
from hybridengine.config.wording import rule, yaml_fault
from hybridengine.errors import ConfigError, UnreadableError, raise_all, shown
from hybridengine.reading import read_text
from hybridengine.topology.links import LinkClass, NodeMap

Text = Annotated[str, Field(min_length=1)]
Rate = Annotated[float, Field(ge=1, le=1e18)]
"""Bytes per second, between what is no link any more and what no link reaches."""
Latency = Annotated[float, Field(ge=0, le=3600)]
"""Seconds, at most an hour."""
Nodes = Annotated[int, Field(ge=1, le=2**20)]
Efficiency = Annotated[float, Field(ge=1e-6, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e9)]
"""Tokens, or passes over memory."""
NodeDevices = Annotated[int, Field(ge=1, le=2**12)]


class Link(Section):
    """One class of links, as every device of the cluster has it."""

    bytes_per_s: Rate
    """Bandwidth of one device, in each direction."""
    node_bytes_per_s: Rate | None = None
    """Bandwidth that the devices of a node have together, in each direction; left out, they do not share."""
    latency_s: Latency
    """Time that a message takes beside its bytes; for the device's own memory, a bucket of copies."""

    def seconds(self, rank_bytes: Any, node_bytes: Any) -> Any:
        """Return the seconds for the bytes of a rank and of its node, numbers or arrays, without latency."""
        seconds = rank_bytes / self.bytes_per_s
        if self.node_bytes_per_s is None:
            return seconds
        return np.maximum(seconds, node_bytes / self.node_bytes_per_s)


class Links(Section):
    """The classes of links."""

    same_device: Link
    """The device's own memory; a copy reads and writes each byte."""
    same_node: Link
    """Between two devices of a node."""
    between_nodes: Link | None = None
    """Between devices of two nodes; a cluster of one node has none."""
    host: Link | None = None
    """Between a device and the memory of its node, where offloaded states go; left out, nothing can be offloaded."""

    def of(self, link: LinkClass) -> Link:
        """Return the figures of a link class; a cluster of several nodes has all of them."""
        figures = getattr(self, link.value)
        assert figures is not None, f"no rank uses links that the cluster lacks: {link.value}"
        return figures

    @property
    def network(self) -> Link:
        """The links between nodes; of a cluster of one node, those inside it."""
        return self.between_nodes or self.same_node


class Compute(Section):
    """Operations of a device per second, and costs beside arithmetic.

    `hybridengine calibrate` measures all of it on the machine that it runs on.
    """

    flops_per_s: dict[Literal["bfloat16", "float32"], Rate]
    """Peak rate of dense matrix products by type; a product and its sum are two operations."""
    efficiency: Efficiency = 0.6
    """Share of the peak that large matrix products reach in a model."""
    half_tokens: Amount = 128.0
    """Tokens of a micro-batch at which a pass over it reaches half of that share."""
    attention_efficiency: Efficiency = 0.3
    """Share of the peak that attention over the sequence reaches."""
    activation_passes: Amount = 12.0
    """Times that a layer reads or writes its hidden state, beside its matrix products."""
    layer_s: Latency = 30e-6
    """Seconds of a layer of a forward pass beside that: launches."""
    micro_batch_s: Latency = 0.5e-3
    """Seconds of each micro-batch of a stage beside its layers."""
    decode_efficiency: Efficiency = 0.6
    """Share of the peak that matrix products reach where each response has one token, as far as arithmetic binds."""
    decode_step_s: Latency = 2e-3
    """Seconds of each step of an engine beside its layers: scheduling and sampling."""
    decode_row_s: Latency = 10e-6
    """Seconds that each running response adds to a step."""
    decode_layer_s: Latency = 20e-6
    """Seconds of each layer of a decoding step beside reading its weights: launches."""
    knee: Annotated[float, Field(ge=1, le=64)] = 4.0
    """Sharpness of the bend between steps bound by memory and steps bound by arithmetic; infinite is a corner."""
    kv_block_tokens: NodeDevices = 16
    """Tokens of a block of KV cache, of which a response holds whole ones."""
    parameter_s: Latency = 20e-6
    """Seconds of each parameter tensor of an optimizer step beside its bytes."""
    exchange_s: Latency = 0.0
    """Seconds of each parameter tensor beside its bytes where replicas exchange gradients and weights."""
    optimizer_step_s: Latency = 5e-3
    """Seconds of each optimizer step beside that."""
    collective_s: Latency = 0.0
    """Seconds of a collective or message of a pass beside those of the link: its ranks are never quite together."""
    overlap: Share = 0.0
    """Share of the exchange of gradients and weights between replicas that is hidden behind the passes."""
    call_s: Latency = 10e-3
    """Seconds of a group call beside its work, from the controller and back; all that a call without a model takes."""
    process_bytes: Bytes | None = None
    """Memory of a rank's process beside its models: contexts, communicators, libraries; left out, none."""
    devices_at_once: NodeDevices | None = None
    """Devices of a node that can work at the same time, where they share something: a CPU's cores."""

    def waiting(self, num_ranks: float) -> float:
        """Return how many times as long work takes where so many ranks of a node work at the same time."""
        return 1.0 if self.devices_at_once is None else max(1.0, num_ranks / self.devices_at_once)

    def rate(self, dtype: str) -> float:
        """Return the peak operations per second.

        Raises:
            ConfigError: the cluster has no figure for that type.
        """
        if dtype not in self.flops_per_s:
            raise ConfigError(
                f"compute.flops_per_s.{dtype} is missing; add it, or choose another model.dtype"
            )
        return self.flops_per_s[dtype]


class Cluster(Section):
    """Nodes of equal devices."""

    name: Text
    """Name of the cluster."""
    source: Text
    """Source of the figures."""
    nodes: Nodes
    """Nodes that can be used."""
    devices_per_node: NodeDevices
    """Devices of a node: one rank each."""
    device_memory_bytes: Bytes
    """Memory of one device."""
    links: Links
    """Bandwidth and latency of each class of links."""
    compute: Compute | None = None
    """Speed of the devices; plans of whole runs need it, those of a switch alone do not."""

    @model_validator(mode="after")
    def _has_links_between_nodes(self) -> Cluster:
        if self.nodes > 1 and self.links.between_nodes is None:
            raise ValueError(
                f"nodes={self.nodes} need links.between_nodes; add its bytes_per_s and latency_s, or set nodes: 1"
            )
        return self

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def resized(self, nodes: int) -> Cluster:
        """Return the same hardware with another number of nodes.

        Raises:
            ConfigError: no positive number, or several nodes without links between them.
        """
        try:
            return Cluster.model_validate(self.model_dump() | {"nodes": nodes})
        except ValidationError as error:
            raise ConfigError(f"cluster {self.name}: {'; '.join(map(_message, error.errors()))}") from None

    def node_map(self, num_ranks: int) -> NodeMap:
        """Return the nodes of ranks 0, 1, 2, ..., one on each device.

        Raises:
            ConfigError: more ranks than devices.
        """
        if num_ranks > self.num_devices:
            needed = -(-num_ranks // self.devices_per_node)
            raise ConfigError(
                f"{num_ranks} ranks exceed the {self.num_devices} devices of cluster {self.name} ({self.nodes} nodes of"
                f" {self.devices_per_node}); give --nodes {needed}, or choose sizes whose product is at most"
                f" {self.num_devices}"
            )
        return NodeMap.uniform(num_ranks, self.devices_per_node)


def load_planned_cluster(path: str | Path, dtype: str) -> Cluster:
    """Return a cluster as `load_cluster` does, with what plans of whole runs need.

    Raises:
        ConfigError: the file says nothing about what devices compute, or not in that type.
    """
    cluster = load_cluster(path)
    if cluster.compute is None:
        raise ConfigError(
            f"{path} has no section compute, which a plan of a whole run needs; add it as in"
            " configs/clusters/a100-80gb-16x8.yaml, or measure it with hybridengine calibrate"
        )
    cluster.compute.rate(dtype)
    return cluster


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster that a YAML file describes.

    Raises:
        ConfigError: no such file, no YAML, or everything that is wrong with its values, in one list.
    """
    remedy = "name a cluster file such as configs/clusters/h100-80gb.yaml"
    try:
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(read_text(path))), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; {remedy}") from None
    except UnreadableError as error:
        raise ConfigError(f"{error}; {remedy}") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid YAML ({yaml_fault(error)}); correct the file, or {remedy}"
        ) from None
    if not isinstance(values, dict) or not values.keys() & Cluster.model_fields.keys():
        raise ConfigError(f"{path} has none of the keys {', '.join(Cluster.model_fields)}; {remedy}")
    try:
        return Cluster.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise_all(f"{path}: {_message(item)}" for item in error.errors())
        raise AssertionError("unreachable") from error


def _message(item: Any) -> str:
    """Return a pydantic error as value, rule and remedy."""
    key, kind, known = ".".join(map(str, item["loc"])), item["type"], known_fields(model=Cluster)
    if kind == "value_error":
        return ": ".join(filter(None, (key, str(item["ctx"]["error"]))))
    if kind == "extra_forbidden":
        above = key.rpartition(".")[0]
        there = [other for other in known if other.rpartition(".")[0] == above]
        near = difflib.get_close_matches(key, there, n=1)
        return f"unknown key {key}; " + (
            f"did you mean {near[0]}?" if near else f"keys here are {', '.join(there)}"
        )
    text = f"{key} is missing; add it"
    if kind != "missing":
        text = f"{key}={shown(item['input'])} must be {rule(item['msg'])}; correct it"
    field = known.get(key)
    return f"{text} ({field.description.rstrip('.')})" if field and field.description else text
