"""Worker groups: every registered method of a worker class can be called on all ranks of a pool as one call."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
from ray import ObjectRef, cloudpickle
from tensordict import TensorDictBase

from hybridengine.config.sections import MAIN_POOL
from hybridengine.controller.call_log import call_log
from hybridengine.controller.calls import Future
from hybridengine.controller.pool import ResourcePool
from hybridengine.controller.rank_process import NewRole
from hybridengine.controller.relays import Asked, Branch, Request, Share
from hybridengine.controller.row_requests import (
    Arguments,
    Call,
    ItemsRequest,
    Part,
    map_arguments,
    traffic_bytes,
)
from hybridengine.controller.rows import Batches, Produced, Rows, Source
from hybridengine.errors import ConfigError, ProtocolError, UnknownNameError, WrongArgumentsError, raise_all
from hybridengine.importing import import_object, nothing_collected
from hybridengine.rows.protocols import GroupTopology, Protocol, Registration, registered
from hybridengine.topology.generation import GenerationGrid, Grouping
from hybridengine.topology.grid import Grid, RankOrder
from hybridengine.topology.sizes import GenSizes, TrainSizes

INLINE_BYTES = 2**16
"""Size limit of rows inside arguments; larger arguments are put into Ray's object store once."""


class WorkerGroup:
    """One role on the ranks of a pool; its registered methods are called like local ones.

        critic = WorkerGroup(pool, CriticWorker, parallel="1-2-2", config={"lr": 1e-5})
        values = critic.compute_values(rollout)     # returns at once; the rows stay on the critic's ranks
        critic.update(rollout.union(values))        # returns a Future of the ranks' results
        values.get("values")                        # fetches the rows to the controller

    Rows in the arguments are split by the method's protocol, and each rank fetches its own rows of the columns that the
    method declares from the ranks that hold them; a TensorDict is sent from the controller. Other values go to every
    rank unchanged.

    Calls run on every rank in order of submission, including those of other groups on the same pool. If the result of a
    call is not fetched, its failure is raised by the next call on the pool.
    """

    def __init__(
        self,
        pool: ResourcePool,
        worker: type | str,
        *,
        parallel: str | TrainSizes,
        generate: str | GenSizes | None = None,
        order: RankOrder = RankOrder.PAPER,
        grouping: Grouping = Grouping.INTERVAL,
        role: str | None = None,
        config: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Create the worker ``worker(context, **config)`` on every rank of the pool, and start the pool if necessary.

        `worker` is a class, or its import path "package.module.Name". `role` defaults to the class's name without
        "Worker". `timeout_s` limits each call, including the creation of the workers; it defaults to the pool's.

        Raises:
            ConfigError, TopologyError, ProtocolError: raised before anything starts: sizes do not multiply to the pool's
                ranks or do not nest, the role exists, or the class has no registered methods.
            RankFailedError: a worker's constructor failed.
        """
        with nothing_collected():  # calls of many ranks make objects, and would have these imports searched
            cls = import_object(worker) if isinstance(worker, str) else worker
        methods = registered(cls)
        self.pool = pool
        self.role = role or _role_of(cls)
        self.timeout_s = pool.timeout_s if timeout_s is None else timeout_s
        grid = Grid(TrainSizes.parse(parallel) if isinstance(parallel, str) else parallel, order)
        sizes = GenSizes.parse(generate) if isinstance(generate, str) else generate
        self.topology = GroupTopology(grid, None if sizes is None else GenerationGrid(grid, sizes, grouping))
        self._methods = methods
        self._signatures = {name: inspect.signature(function) for name, (function, _) in methods.items()}
        raise_all(self._problems(cls))
        pool.roles.add(self.role)
        pool.start()
        of_pool = f", pool {pool.name}" if pool.name not in ("", MAIN_POOL) else ""
        self._places = [
            f"{coordinate}, node {node}{of_pool}"
            for coordinate, node in zip(grid.coordinates(), pool.nodes, strict=True)
        ]
        self._sources: dict[Protocol, tuple[int, ...]] = {}
        self._make_workers(worker, dict(config or {}))

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods = self.__dict__.get("_methods", {})
        if name not in methods:
            near = difflib.get_close_matches(name, methods, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(methods)) or 'none'}"
            raise UnknownNameError(
                f"{name!r} is not a registered method of {self.__dict__.get('role')!r}; {hint}"
            )

        def group_call(*args: Any, **kwargs: Any) -> Future | Rows:
            return self._call(name, args, kwargs)

        function, _ = methods[name]
        group_call.__name__, group_call.__doc__ = name, function.__doc__
        return group_call

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]

    def __repr__(self) -> str:
        return f"WorkerGroup({self.role}, {self.topology}, {self.num_ranks} ranks)"

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future | Rows:
        operation = f"{self.role}.{method}"
        try:
            self._signatures[method].bind(self, *args, **kwargs)
        except TypeError as error:
            raise WrongArgumentsError(f"{operation}{self._signatures[method]}: {error}") from None
        registration = self._methods[method][1]
        arguments = _plain(args, kwargs)
        values = [*arguments[0], *arguments[1].values()]
        ranges, has_rows = self._row_ranges(registration.protocol, values, operation)
        if registration.returns_rows and not has_rows:
            raise ProtocolError(
                f"{operation} returns a row for each that it is given, and was given none; pass rows"
            )
        call, sources = Call(self.role, method, self.timeout_s), self._source_ranks(registration.protocol)
        are_sources, parts = frozenset(sources), dict[range, _Packed]()

        def ask(branch: Branch) -> Asked:
            own = [ranges[rank] for rank in branch.ranks]
            rows = range(min(one.start for one in own), max(one.stop for one in own))
            if rows not in parts:
                parts[rows] = _packed(call, registration, arguments, rows)
            call_log().count(parts[rows].num_bytes)
            shares = [Share(one, rank in are_sources) for one, rank in zip(own, branch.ranks, strict=True)]
            packed, inputs = parts[rows].content, parts[rows].inputs
            return branch.ask(Request("call", packed, shares, inputs, registration.returns_rows))

        future = self.pool.submit(
            self.role,
            method,
            ask,
            sources=sources,
            timeout_s=self.timeout_s,
            places=self._places,
            inputs=[call for value in values if isinstance(value, Rows) for call in value.calls],
        )
        if not registration.returns_rows:
            return future
        first_rows = np.array([ranges[rank].start for rank in sources])
        produced = Produced((future,), first_rows, ranges[sources[-1]].stop)
        return Rows([Source(produced)], produced.num_rows)

    def _source_ranks(self, protocol: Protocol) -> tuple[int, ...]:
        if protocol not in self._sources:
            self._sources[protocol] = protocol.source_ranks(self.topology)
        return self._sources[protocol]

    def _row_ranges(
        self, protocol: Protocol, values: list[Any], operation: str
    ) -> tuple[tuple[range, ...], bool]:
        """Return the rows or items of each rank, and True if the call has rows; raises ProtocolError."""
        sized = values if protocol.takes_items else [value for value in values if isinstance(value, Rows)]
        wrong = [value for value in sized if not isinstance(value, list | tuple)]
        if protocol.takes_items and wrong:
            raise ProtocolError(
                f"{operation} got a {type(wrong[0]).__name__}, but {protocol.name} takes lists with one item per rank;"
                f" pass a list of {self.num_ranks} items"
            )
        sizes = {len(value) for value in sized}
        if len(sizes) > 1:
            raise ProtocolError(
                f"{operation} got arguments with {' and '.join(map(str, sorted(sizes)))}"
                f" {'items' if protocol.takes_items else 'rows'}; all of them must have the same number"
            )
        if not sizes and not protocol.takes_items:
            return (range(0),) * self.num_ranks, False
        try:
            num_rows = sizes.pop() if sizes else self.num_ranks
            return protocol.row_ranges(num_rows, self.topology), not protocol.takes_items
        except ProtocolError as error:
            raise ProtocolError(f"{operation}: {error}") from None

    def _make_workers(self, worker: type | str, config: dict[str, Any]) -> None:
        packed = cloudpickle.dumps(NewRole(self.role, worker, self.topology, config))
        self.pool.submit(
            self.role,
            "__init__",
            lambda branch: branch.ask(Request("add_role", packed, [Share()] * len(branch.ranks))),
            sources=(),
            timeout_s=max(self.timeout_s, self.pool.start_timeout_s),
            places=self._places,
        ).wait()

    def _problems(self, cls: type) -> list[str]:
        problems = []
        if self.num_ranks != self.pool.num_ranks:
            sizes = self.topology.grid.sizes
            problems.append(
                f"{self.role}: parallel={sizes} makes {sizes.factors} ="
                f" {self.num_ranks} ranks, and the pool has {self.pool.num_ranks}; choose sizes whose product is"
                f" {self.pool.num_ranks}"
            )
        if self.role in self.pool.roles:
            problems.append(
                f"role {self.role!r} exists in this pool; give each worker group a role of its own, e.g."
                f" role='{self.role}_2'"
            )
        if not self._methods:
            problems.append(
                f"{cls.__name__} has no registered method; decorate those that the controller calls with @register"
            )
        for name in sorted(self._methods):
            if hasattr(WorkerGroup, name) or name in self.__dict__:
                problems.append(
                    f"{cls.__name__}.{name} has the name of an attribute of WorkerGroup; rename the method"
                )
        return problems


def _plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments with futures replaced by their results, and batches by references to them."""

    def value(argument: Any) -> Any:
        if isinstance(argument, Future):
            argument = argument.get()
        return Rows.of(argument) if isinstance(argument, TensorDictBase) else argument

    return map_arguments((args, kwargs), value)


class _Packed(NamedTuple):
    """A `Part`, pickled once for all ranks whose rows it has."""

    content: bytes | ObjectRef
    inputs: Sequence[ObjectRef]
    """References that accompany it, in which its batches are found."""
    num_bytes: int
    """Bytes of rows sent by the controller to each branch of ranks."""


def _packed(call: Call, registration: Registration, arguments: Arguments, rows: range) -> _Packed:
    batches: Batches = {}

    def value(argument: Any) -> Any:
        if registration.protocol.takes_items:
            return ItemsRequest(rows, argument[rows.start : rows.stop])
        if not isinstance(argument, Rows):
            return argument
        return argument.request(rows, registration.columns, batches, registration.optional)

    requests = map_arguments(arguments, value)
    inputs = {reference: index for index, reference in enumerate(dict.fromkeys(one for one, _ in batches))}
    part = Part(call, requests, [(inputs[reference], path) for reference, path in batches])
    num_bytes = traffic_bytes(requests)
    content = ray.put(part) if num_bytes > INLINE_BYTES else cloudpickle.dumps(part)
    return _Packed(content, [*inputs], num_bytes)


def _role_of(cls: type) -> str:
    name = cls.__name__.removesuffix("Worker")
    if not name:
        raise ConfigError(f"no role can be derived from the class name {cls.__name__!r}; pass role=...")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
