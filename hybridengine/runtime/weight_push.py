"""The weight sync to other ranks: trained weights are copied into engines elsewhere, and the policy keeps its own."""

from __future__ import annotations

from hybridengine.errors import PlanError
from hybridengine.reshard.plan import Plan
from hybridengine.runtime.executor import PlanExecutor, Verify
from hybridengine.runtime.fingerprint import check_agreement
from hybridengine.runtime.ledger import StorageLedger, SwitchReport
from hybridengine.runtime.storage import WeightStorage
from hybridengine.runtime.transport import PointToPointTransport

SOURCE, DESTINATION = "policy", "engine"


class WeightPush:
    """Carries out a plan between ranks that train and ranks that generate. All ranks of the plan push together.

    Args:
        source: weights of this rank's policy; empty on a rank that only generates.
        destination: weights of this rank's engine; empty on a rank that only trains.
        verify: when receivers check the bits of what they have received.

    Raises:
        PlanError: the layouts do not describe the two models, or the ranks bring different plans.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source: WeightStorage,
        destination: WeightStorage,
        transport: PointToPointTransport,
        verify: Verify = Verify.FIRST,
    ) -> None:
        self._ledger = StorageLedger({SOURCE: source, DESTINATION: destination})
        try:
            self._executor = PlanExecutor(
                plan, rank, source, destination, transport, self._ledger, release_source=False
            )
        except PlanError as error:
            check_agreement(plan, rank, transport.group, verify.value, str(error))
            raise
        self._verify, self._has_pushed = verify, False
        check_agreement(plan, rank, transport.group, verify.value)

    def push(self) -> SwitchReport:
        """Write the policy's present weights into the engines; return what it cost this rank.

        `redundant_bytes` are the policy's weights on this rank, which stay: 0 where a rank only generates.

        Raises:
            PlanError: the plan is stale.
            TransferError: a message failed, or arrived changed; the engines' weights are then undefined.
        """
        self._executor.check_fresh()
        self._ledger.begin()
        checked = self._verify is Verify.ALWAYS or (self._verify is Verify.FIRST and not self._has_pushed)
        self._executor.run(verify=checked)
        self._has_pushed = True
        return self._ledger.finish("push", DESTINATION)
