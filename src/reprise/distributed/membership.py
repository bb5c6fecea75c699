"""Who is here and which lanes are whose."""

from dataclasses import dataclass

from reprise.runtime import UserError, check_one_of


@dataclass
class ClusterConfig:
    """Where a run computes. `devices` are ranks on one node; `timeout_s` is how long one waits for another."""

    accelerator: str = "cpu"
    devices: int = 1
    nodes: int = 1
    precision: str = "auto"
    strategy: str = "ddp"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_one_of("cluster.accelerator", self.accelerator, allowed=("cpu", "gpu"))
        check_one_of("cluster.precision", self.precision, allowed=("auto", "32-true", "bf16-mixed", "16-mixed"))
        check_one_of("cluster.strategy", self.strategy, allowed=("ddp",))
        for key in ("devices", "nodes"):
            if getattr(self, key) < 1:
                raise UserError(f"cluster.{key}={getattr(self, key)}: at least 1")
        if not self.timeout_s > 0:
            raise UserError(f"cluster.timeout_s={self.timeout_s}: more than 0")

    @property
    def backend(self) -> str:
        """The process group's backend."""
        return "nccl" if self.accelerator == "gpu" else "gloo"

    def check_devices(self) -> None:
        """Raise a UserError where this node has fewer GPUs than the ranks to start on it."""
        if self.accelerator != "gpu":
            return
        import torch

        found = torch.cuda.device_count()
        if found < self.devices:
            raise UserError(
                f"cluster.accelerator=gpu: {found} GPUs here, cluster.devices={self.devices}; try cluster=cpu"
            )


def lanes_of_rank(num_lanes: int, *, rank: int, num_ranks: int) -> range:
    """The contiguous lanes that `rank` computes; sizes differ by at most one, every lane has one owner."""
    assert 0 <= rank < num_ranks
    return range(num_lanes * rank // num_ranks, num_lanes * (rank + 1) // num_ranks)


def lane_groups(lanes: range, num_groups: int) -> list[range]:
    """A rank's lanes in the groups that gradient accumulation takes one after the other."""
    assert len(lanes) >= num_groups, "the schema checks that every rank has a lane for every group"
    return [
        lanes[len(lanes) * group // num_groups : len(lanes) * (group + 1) // num_groups] for group in range(num_groups)
    ]
