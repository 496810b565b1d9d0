"""Settings of `hybridengine bench dispatch`, which are checked without torch."""

from dataclasses import dataclass

from hybridengine.errors import ConfigError, TopologyError
from hybridengine.machine import PROCESS_BYTES
from hybridengine.topology.sizes import TrainSizes

NUM_TOKENS = 1024
ROW_BYTES = 8 * NUM_TOKENS


@dataclass(frozen=True)
class DispatchSpec:
    """Settings of one measurement."""

    producer: TrainSizes
    consumer: TrainSizes
    batch_bytes: int
    repetitions: int
    timeout_s: float

    def __post_init__(self) -> None:
        replicas = max(self.producer.dp_size, self.consumer.dp_size)
        if self.num_rows < replicas:
            raise ConfigError(
                f"--bytes {self.batch_bytes} is less than a row of {ROW_BYTES} bytes for each of {replicas} replicas;"
                f" choose at least {replicas * ROW_BYTES}"
            )
        if self.producer.num_ranks != self.consumer.num_ranks:
            raise TopologyError(
                f"{self.producer} has {self.producer.num_ranks} ranks and {self.consumer} has"
                f" {self.consumer.num_ranks}; both groups share one pool, choose sizes with equal products"
            )

    @property
    def num_rows(self) -> int:
        return self.batch_bytes // ROW_BYTES

    @property
    def needed_bytes(self) -> int:
        """Approximate peak memory of all processes together.

        The batch is held by its producers, by the controller and in Ray's object store, and each consumer holds its
        data-parallel part twice: as an object and as a tensor.
        """
        consumed = self.batch_bytes * self.consumer.model_parallel_size
        return 3 * self.batch_bytes + 2 * consumed + self.producer.num_ranks * PROCESS_BYTES
