"""micro-dp: this project's HybridEngine. Ranks of a micro-DP group gather shards in place, with interval grouping."""

from __future__ import annotations

from hybridengine.bench.reshard.methods.method import Method, engine_weights
from hybridengine.reshard.compiler import compile_plan
from hybridengine.reshard.domains import domains
from hybridengine.reshard.vllm import vllm_layout
from hybridengine.topology.generation import GenerationGrid
from hybridengine.topology.grid import group_with
from hybridengine.weights.executor import Verify
from hybridengine.weights.hybrid_engine import HybridEngine
from hybridengine.weights.ledger import SwitchReport
from hybridengine.weights.storage import WeightStorage
from hybridengine.weights.transport import PointToPointTransport


class _PlainEngine:
    """Implements GenerationSide with plain tensors in vLLM's layout: no engine, no KV cache."""

    def __init__(self, weights: WeightStorage) -> None:
        self.weights = weights

    def leave_generation(self) -> None:
        pass

    def enter_generation(self, version: int) -> None:
        pass


class MicroDp(Method):
    """One copy of the weights, whose storage changes owner bucket by bucket. The way back is local."""

    two_step = True
    """True if each box is sent to a node once, and then forwarded to the other ranks of that node."""

    def prepare(self) -> None:
        actor = self.actor
        self.layout = vllm_layout(actor.shape, GenerationGrid(actor.grid, self.pair.gen))
        self.destination = engine_weights(actor, self.layout)
        groups = domains(actor.layout, self.layout)
        plan = compile_plan(
            actor.layout,
            self.layout,
            group_with(actor.rank, groups),
            self.bucket_elements,
            self.spec.nodes(self.pair),
            two_step=self.two_step,
        )
        self._engine = HybridEngine(
            plan,
            actor.rank,
            actor,
            _PlainEngine(self.destination),
            PointToPointTransport(actor.registry.new(groups)),
            Verify(self.verify),
        )

    def there(self) -> SwitchReport:
        return self._engine.to_generate()

    def back(self) -> SwitchReport:
        return self._engine.to_train()
