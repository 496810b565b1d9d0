"""Nodes, devices and links of a cluster, read from a YAML file, and the seconds of collectives and messages over them.

Bandwidths are per direction: half of the figure for links that are specified by the sum of both, such as NVLink.
"""

from __future__ import annotations

import difflib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, model_validator

from hybridengine.config.loading import known_fields, rule, yaml_fault
from hybridengine.config.values import Bytes, Section, Share
from hybridengine.errors import ConfigError, UnreadableError, raise_all, shown
from hybridengine.files import read_text
from hybridengine.topology.links import LinkClass, NodeMap

Text = Annotated[str, Field(min_length=1)]
Rate = Annotated[float, Field(ge=1, le=1e18)]
"""Bytes per second, or operations per second, within plausible bounds."""
Latency = Annotated[float, Field(ge=0, le=3600)]
"""Number of seconds, at most an hour."""
Nodes = Annotated[int, Field(ge=1, le=2**20)]
Efficiency = Annotated[float, Field(ge=1e-6, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e9)]
"""Number of tokens, or of passes over memory."""
NodeDevices = Annotated[int, Field(ge=1, le=2**12)]


class Link(Section):
    """One class of links, the same for every device of the cluster."""

    bytes_per_s: Rate
    """Bandwidth of one device, in each direction."""
    node_bytes_per_s: Rate | None = None
    """Bandwidth that the devices of a node share, in each direction; by default they do not share any."""
    latency_s: Latency
    """Fixed time of a message in addition to its bytes; for the device's own memory, of a bucket of copies."""

    def seconds(self, rank_bytes: Any, node_bytes: Any) -> Any:
        """Return the seconds, without latency, for the bytes of a rank and of its node (numbers or arrays)."""
        seconds = rank_bytes / self.bytes_per_s
        if self.node_bytes_per_s is None:
            return seconds
        return np.maximum(seconds, node_bytes / self.node_bytes_per_s)


class Links(Section):
    """Classes of links of a cluster."""

    same_device: Link
    """The device's own memory; a copy reads and writes each byte."""
    same_node: Link
    """Links between two devices of a node."""
    between_nodes: Link | None = None
    """Links between devices of two nodes; a cluster of one node has none."""
    host: Link | None = None
    """Links between a device and host memory, for offloaded state; if omitted, offloading takes no time."""

    def of(self, link: LinkClass) -> Link:
        """Return the figures of a link class that the cluster has."""
        figures = getattr(self, link.value)
        assert figures is not None, f"no rank uses links that the cluster lacks: {link.value}"
        return figures

    @property
    def network(self) -> Link:
        """Links between nodes; for a cluster of one node, those within the node."""
        return self.between_nodes or self.same_node


class Compute(Section):
    """Operations per second of a device, and costs in addition to arithmetic; `hybridengine calibrate` measures them."""

    flops_per_s: dict[Literal["bfloat16", "float32"], Rate]
    """Peak rate of dense matrix products by type; a multiply-add counts as two operations."""
    efficiency: Efficiency = 0.6
    """Share of the peak that large matrix products reach in a model."""
    half_tokens: Amount = 128.0
    """Tokens of a micro-batch at which a pass reaches half of that share."""
    attention_efficiency: Efficiency = 0.3
    """Share of the peak that attention over the sequence reaches."""
    activation_passes: Amount = 12.0
    """Number of times that a layer reads or writes its hidden state, apart from its matrix products."""
    layer_s: Latency = 30e-6
    """Additional seconds of each layer in a forward pass, for launches."""
    micro_batch_s: Latency = 0.5e-3
    """Additional seconds of each micro-batch in a stage."""
    decode_efficiency: Efficiency = 0.6
    """Share of the peak that matrix products reach in compute-bound decoding, with one token per response."""
    decode_step_s: Latency = 2e-3
    """Additional seconds of each decoding step, for scheduling and sampling."""
    decode_row_s: Latency = 10e-6
    """Additional seconds of each running response in a decoding step."""
    decode_layer_s: Latency = 20e-6
    """Additional seconds of each layer in a decoding step, for launches."""
    knee: Annotated[float, Field(ge=1, le=64)] = 4.0
    """Sharpness of the transition from memory-bound to compute-bound decoding steps; larger is sharper."""
    kv_block_tokens: NodeDevices = 16
    """Tokens of a block of KV cache; a response holds whole blocks."""
    parameter_s: Latency = 20e-6
    """Additional seconds of each parameter tensor in an optimizer step."""
    exchange_s: Latency = 0.0
    """Additional seconds of each parameter tensor when replicas exchange gradients and weights."""
    optimizer_step_s: Latency = 5e-3
    """Additional seconds of each optimizer step."""
    collective_s: Latency = 0.0
    """Additional seconds of each collective or message in a pass, because its ranks do not arrive at the same time."""
    overlap: Share = 0.0
    """Share of the exchange of gradients and weights between replicas that is hidden behind the passes."""
    call_s: Latency = 10e-3
    """Overhead of a group call, from the controller and back; the whole time of a call without a model."""
    process_bytes: Bytes | None = None
    """Memory of a rank's process without models: contexts, communicators, libraries; 0 by default."""
    devices_at_once: NodeDevices | None = None
    """Number of a node's devices that can work at the same time, if they share resources such as a CPU's cores."""

    def waiting(self, num_ranks: float) -> float:
        """Return the slowdown of work when `num_ranks` ranks of a node work at the same time."""
        return 1.0 if self.devices_at_once is None else max(1.0, num_ranks / self.devices_at_once)

    def rate(self, dtype: str) -> float:
        """Return the peak operations per second for a type; a ConfigError if the cluster has no figure for it."""
        if dtype not in self.flops_per_s:
            raise ConfigError(
                f"compute.flops_per_s.{dtype} is missing; add it, or choose another model.dtype"
            )
        return self.flops_per_s[dtype]


class Cluster(Section):
    """Nodes of equal devices."""

    name: Text
    source: Text
    """Source of the figures."""
    nodes: Nodes
    devices_per_node: NodeDevices
    """Number of devices per node, with one rank each."""
    device_memory_bytes: Bytes
    links: Links
    compute: Compute | None = None
    """Speed of the devices; needed to plan whole runs, but not switches alone."""

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

    @property
    def process_bytes(self) -> int:
        return (self.compute and self.compute.process_bytes) or 0

    @property
    def model_memory_bytes(self) -> int:
        """Memory of a device for models and KV cache."""
        return self.device_memory_bytes - self.process_bytes

    def resized(self, nodes: int) -> Cluster:
        """Return the same hardware with `nodes` nodes; a ConfigError if it cannot have as many."""
        try:
            return Cluster.model_validate(self.model_dump() | {"nodes": nodes})
        except ValidationError as error:
            raise ConfigError(f"cluster {self.name}: {'; '.join(map(_message, error.errors()))}") from None

    def node_map(self, num_ranks: int) -> NodeMap:
        """Return the nodes of ranks 0, 1, 2, ..., one per device; a ConfigError if there are too few devices."""
        if num_ranks > self.num_devices:
            needed = -(-num_ranks // self.devices_per_node)
            raise ConfigError(
                f"{num_ranks} ranks exceed the {self.num_devices} devices of cluster {self.name} ({self.nodes} nodes of"
                f" {self.devices_per_node}); give --nodes {needed}, or choose sizes whose product is at most"
                f" {self.num_devices}"
            )
        return NodeMap.uniform(num_ranks, self.devices_per_node)


def load_planned_cluster(path: str | Path, dtype: str) -> Cluster:
    """Return a cluster as `load_cluster` does; a ConfigError if it lacks figures for plans of whole runs in `dtype`."""
    cluster = load_cluster(path)
    if cluster.compute is None:
        raise ConfigError(
            f"{path} has no section compute, which a plan of a whole run needs; add it as in"
            " configs/clusters/a100-80gb-16x8.yaml, or measure it with hybridengine calibrate"
        )
    cluster.compute.rate(dtype)
    return cluster


def load_cluster(path: str | Path) -> Cluster:
    """Return the cluster that a YAML file describes; a ConfigError lists everything that is invalid."""
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


@dataclass(frozen=True)
class Axis:
    """Groups of a grid along one axis, each with `size` ranks at a distance of `stride`."""

    size: int
    stride: int


@dataclass(frozen=True)
class Fabric:
    """Links of `num_ranks` consecutive ranks of a cluster, with one rank per device.

    All groups of a grid communicate at the same time, and groups with members on the same node share its bandwidth.
    Collectives are rings, like those of gloo and NCCL for large messages: each rank receives (g - 1) / g of the result,
    and a ring enters a node once. Bytes are numbers, or arrays with one element per message.
    """

    cluster: Cluster
    num_ranks: int

    @property
    def node_ranks(self) -> int:
        """Number of ranks on a full node."""
        return min(self.cluster.devices_per_node, self.num_ranks)

    def members_per_node(self, axis: Axis) -> int:
        """Return the number of ranks of one group on a node."""
        return max(1, min(axis.size, self.node_ranks // axis.stride))

    def all_gather_s(self, num_bytes: Any, *axes: Axis) -> Any:
        """Return the seconds of an all-gather with a result of `num_bytes`, over the ranks along all of the axes."""
        size = math.prod(axis.size for axis in axes)
        if size == 1:
            return 0.0
        received = num_bytes * (size - 1) / size
        members = math.prod(map(self.members_per_node, axes))
        nodes = -(-size // members)
        inside, seconds, latency = self.cluster.links.same_node, 0.0, 0.0
        if members > 1:
            seconds = inside.seconds(received, received * self.node_ranks)
            latency = inside.latency_s * (members - 1) * nodes
        if nodes > 1:
            between = self.cluster.links.network
            rings = self.node_ranks / members
            seconds = np.maximum(seconds, between.seconds(received, received * rings))
            latency += between.latency_s * (nodes - 1)
        return seconds + latency

    def all_reduce_s(self, num_bytes: Any, *axes: Axis) -> Any:
        """Return the seconds of an all-reduce of `num_bytes`, which is that of two all-gathers."""
        if all(axis.size == 1 for axis in axes):
            return 0.0
        return 2 * self.all_gather_s(num_bytes, *axes) + self._collective_s

    def all_to_all_s(self, num_bytes: Any, *axes: Axis) -> Any:
        """Return the seconds in which each rank sends `num_bytes` in equal parts to all ranks along the axes.

        Parts go straight to their ranks, those to other nodes at the same time as the others.
        """
        size = math.prod(axis.size for axis in axes)
        if size == 1:
            return 0.0
        members, seconds, latency = math.prod(map(self.members_per_node, axes)), 0.0, 0.0
        part = num_bytes / size
        if members > 1:
            inside = self.cluster.links.same_node
            sent = part * (members - 1)
            seconds, latency = inside.seconds(sent, sent * self.node_ranks), inside.latency_s
        if size > members:
            between = self.cluster.links.network
            sent = part * (size - members)
            seconds = np.maximum(seconds, between.seconds(sent, sent * self.node_ranks))
            latency = max(latency, between.latency_s)
        return seconds + latency + self._collective_s

    @property
    def _collective_s(self) -> float:
        return self.cluster.compute.collective_s if self.cluster.compute else 0.0

    def sends_s(self, num_bytes: Any, axis: Axis, count: int = 1, blocks: int = 1) -> Any:
        """Return the seconds of the slowest rank's messages to `count` neighbours; groups and directions work at once.

        With several `blocks` of a rank, each sends its own, and the last rank's next neighbour is the first.
        """
        if axis.size == 1:
            return 0.0
        count *= blocks
        num_sent = count
        if axis.size == 2 and count > blocks:
            count -= 1  # the first block of all sends nothing back, the last nothing on
        members, links, inside, across = self.members_per_node(axis), self.cluster.links, 0.0, 0.0
        if members > 1:
            inside = links.same_node.seconds(num_bytes, num_bytes * self.node_ranks)
            inside += links.same_node.latency_s
        if axis.size > members:
            # Ranks whose neighbour is on the next node: the last `stride` ranks of a node.
            leaving = min(axis.stride, self.node_ranks)
            between = links.network
            across = between.seconds(num_bytes, num_bytes * leaving) + between.latency_s
        crossing = blocks if members > 1 else count
        slowest_s = np.maximum(inside * count, across * crossing + inside * (count - crossing))
        return slowest_s + num_sent * self._collective_s
