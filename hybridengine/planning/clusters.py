"""Hardware as data: a cluster's nodes, devices and links, read from a YAML file that is checked as a whole.

The files are in configs/clusters/. All figures are per direction; a link that is sold by its sum of both directions, as
NVLink is, has half of it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, ValidationError, model_validator

from hybridengine.config.values import Bytes, Section, Share
from hybridengine.config.wording import rule, yaml_fault
from hybridengine.errors import ConfigError, UnreadableError, raise_all, shown
from hybridengine.reading import check_regular
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

    def seconds(self, rank_bytes: float, node_bytes: float) -> float:
        """Return the seconds for the bytes of a rank and of its node, without latency."""
        seconds = rank_bytes / self.bytes_per_s
        return seconds if self.node_bytes_per_s is None else max(seconds, node_bytes / self.node_bytes_per_s)


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
        """Figures of a link class.

        Raises:
            ConfigError: the cluster has no such links.
        """
        figures = getattr(self, link.value)
        if figures is None:
            raise ConfigError(f"links.{link.value} is missing; add its bytes_per_s and latency_s")
        return figures


class FlopRates(Section):
    """Floating-point operations per second by type; a product and its sum are two."""

    bfloat16: Rate | None = None
    """Of dense matrices."""
    float32: Rate | None = None
    """Of dense matrices."""


class HostCall(Section):
    """What a call without a model takes: reading prompts, advantages, statistics, reward functions."""

    call_s: Latency = 0.0
    """Of a call, waits for slower ranks included."""
    row_s: Latency = 0.0
    """Of each row that a rank has."""


class HostCalls(Section):
    """Calls without a model, by what they do."""

    training_prompts: HostCall = HostCall()
    """Reading prompts."""
    compute_scores: HostCall = HostCall()
    """A reward function."""
    map: HostCall = HostCall()
    """Advantages."""
    measure: HostCall = HostCall()
    """Statistics."""


class Compute(Section):
    """What a device computes in a second, and what work costs beside its arithmetic.

    `hybridengine calibrate` measures all of it on the machine that it runs on.
    """

    flops_per_s: FlopRates
    """Peak rates."""
    efficiency: Efficiency = 0.6
    """Share of the peak that large matrix products reach in a model."""
    half_tokens: Amount = 128.0
    """Tokens of a micro-batch at which a pass over it reaches half of that share."""
    attention_efficiency: Efficiency = 0.3
    """Share of the peak that attention over the sequence reaches."""
    activation_passes: Amount = 12.0
    """How often a layer reads or writes its hidden state, beside its matrix products."""
    layer_s: Latency = 30e-6
    """What a layer of a forward pass takes beside that: launches."""
    micro_batch_s: Latency = 0.5e-3
    """What each micro-batch of a stage takes beside its layers."""
    decode_efficiency: Efficiency = 0.6
    """Share of the peak that matrix products reach where each response has one token, as far as arithmetic binds."""
    decode_step_s: Latency = 2e-3
    """What each step of an engine takes beside its layers: scheduling and sampling."""
    decode_row_s: Latency = 10e-6
    """What each running response adds to a step."""
    decode_layer_s: Latency = 20e-6
    """What each layer of a decoding step takes beside reading its weights: launches."""
    knee: Annotated[float, Field(ge=1, le=64)] = 4.0
    """How sharp the bend is between steps bound by memory and steps bound by arithmetic; infinite would be a corner."""
    kv_block_tokens: NodeDevices = 16
    """Tokens of a block of KV cache, of which a response holds whole ones."""
    fill_bytes_per_s: Rate | None = None
    """Rate at which a device takes memory that it had given back, page by page; left out, it takes no time."""
    parameter_s: Latency = 20e-6
    """What each parameter tensor of an optimizer step takes beside its bytes."""
    exchange_s: Latency = 0.0
    """What each parameter tensor takes beside its bytes where replicas exchange gradients and weights."""
    optimizer_step_s: Latency = 5e-3
    """What each optimizer step takes beside that."""
    collective_s: Latency = 0.0
    """What a collective or a message of a pass takes beside what the link says: its ranks are never quite together."""
    switch_bucket_s: Latency = 0.0
    """What a bucket of a switch takes beside what the links say, for each other rank that it meets."""
    overlap: Share = 0.0
    """Share of the exchange of gradients and weights between replicas that is hidden behind the passes."""
    call_s: Latency = 10e-3
    """What a group call takes beside its work, from the controller and back."""
    host: HostCalls = HostCalls()
    """Calls without a model."""
    process_bytes: Bytes | None = None
    """Memory of a rank's process beside its models: contexts, communicators, libraries; left out, none."""
    devices_at_once: NodeDevices | None = None
    """Devices of a node that can work at the same time, where they share something: a CPU's cores."""

    def waiting(self, num_ranks: float) -> float:
        """How many times as long work takes where so many ranks of a node work at the same time."""
        return 1.0 if self.devices_at_once is None else max(1.0, num_ranks / self.devices_at_once)

    def rate(self, dtype: str) -> float:
        """Peak operations per second.

        Raises:
            ConfigError: the cluster has no figure for that type.
        """
        found = getattr(self.flops_per_s, dtype, None)
        if found is None:
            raise ConfigError(
                f"compute.flops_per_s.{dtype} is missing; add it, or choose another model.dtype"
            )
        return found


class Cluster(Section):
    """Nodes of equal devices."""

    name: Text
    """What people call it."""
    source: Text
    """Where the figures come from."""
    nodes: Nodes
    """Nodes that can be used."""
    devices_per_node: NodeDevices
    """Devices of a node: one rank each."""
    device_memory_bytes: Bytes
    """Memory of one device."""
    links: Links
    """Bandwidth and latency of each class of links."""
    compute: Compute | None = None
    """What devices compute; plans of whole runs need it, those of a switch alone do not."""

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
        """The same hardware with another number of nodes.

        Raises:
            ConfigError: no positive number, or several nodes without links between them.
        """
        try:
            return Cluster.model_validate(self.model_dump() | {"nodes": nodes})
        except ValidationError as error:
            raise ConfigError(
                f"cluster {self.name} with {nodes} nodes: "
                + "; ".join(_message(item) for item in error.errors())
            ) from None

    def node_map(self, num_ranks: int) -> NodeMap:
        """Ranks 0, 1, 2, ... on the nodes, one on each device.

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
    """As `load_cluster`, with what plans of whole runs need.

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
    """Cluster that a YAML file describes.

    Raises:
        ConfigError: no such file, no YAML, or everything that is wrong with its values, in one list.
    """
    remedy = "name a cluster file such as configs/clusters/h100-80gb.yaml"
    try:
        check_regular(path)
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; {remedy}") from None
    except UnreadableError as error:
        raise ConfigError(f"{error}; {remedy}") from None
    except OSError as error:
        if error.strerror is not None:
            raise ConfigError(f"{path} cannot be read ({error.strerror}); {remedy}") from None
        values = None  # OmegaConf's own: the file holds a single value
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid YAML ({yaml_fault(error)}); correct the file, or {remedy}"
        ) from None
    if not isinstance(values, dict) or not values.keys() & Cluster.model_fields.keys():
        found = "has none of" if isinstance(values, dict) else "must hold a mapping with"
        raise ConfigError(f"{path} {found} the keys {', '.join(Cluster.model_fields)}; {remedy}")
    try:
        return Cluster.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise_all(f"{path}: {_message(item)}" for item in error.errors())
        raise AssertionError("unreachable") from error


def _message(item: Any) -> str:
    """A pydantic error as value, rule and remedy."""
    location, kind = [str(part) for part in item["loc"]], item["type"]
    key = ".".join(location)
    if kind == "extra_forbidden":
        siblings = list(_model_at(location[:-1]).model_fields)
        near = difflib.get_close_matches(location[-1], siblings, n=1)
        hint = (
            f"did you mean {'.'.join([*location[:-1], near[0]])}?"
            if near
            else f"keys here are {', '.join(siblings)}"
        )
        return f"unknown key {key}; {hint}"
    if kind == "value_error":
        return ": ".join(part for part in (key, str(item["ctx"]["error"])) if part)
    if kind == "missing":
        return f"{key} is missing; add it (it is: {_meaning(location)})"
    return (
        f"{key}={shown(item['input'])} must be {rule(item['msg'])}; correct it (it is: {_meaning(location)})"
    )


def _model_at(location: Sequence[str]) -> type[BaseModel]:
    model: type[BaseModel] = Cluster
    for part in location:
        annotation = model.model_fields[part].annotation
        kinds = [annotation, *get_args(annotation)]
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return model


def _meaning(location: Sequence[str]) -> str:
    """A field's description, as the end of a sentence."""
    text = (_model_at(location[:-1]).model_fields[location[-1]].description or "").rstrip(".")
    return text[0].lower() + text[1:]
