"""Places for engines on a Ray cluster, from the resources of its nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nwor_bench.errors import ConfigError


@dataclass(frozen=True)
class Slot:
    """Place for an engine: any free GPU of the cluster, or one whole machine without GPUs.

    `node` is that machine's Ray node; None for any GPU.
    """

    options: dict[str, Any]
    node: str | None = None


def find_slots(nodes: Sequence[dict[str, Any]], gpus_each: int, make_affinity: Any) -> list[Slot]:
    """Places for engines that run at the same time, from `ray.nodes()`.

    With GPUs one slot for each engine that they can hold; else one for each machine, which the
    engine gets as a whole. Raises ConfigError if no engine fits, and if two Ray nodes without
    GPUs share a machine: two engines on it would time each other.
    """
    alive = [node for node in nodes if node["Alive"]]
    gpus = [int(node["Resources"].get("GPU", 0)) for node in alive]
    if any(gpus):
        places = sum(count // gpus_each for count in gpus)
        if places == 0:
            raise ConfigError.for_field(
                "tensor_parallel_size", gpus_each,
                f"the cluster's nodes have {max(gpus)} GPUs at most; write {max(gpus)} or less",
            )  # fmt: skip
        return [Slot({"num_gpus": gpus_each, "num_cpus": 1})] * places
    hosts = [str(node["NodeManagerHostname"]) for node in alive]
    for host in hosts:
        if hosts.count(host) > 1:
            raise ConfigError.for_field(
                "--ray", True,
                f"{hosts.count(host)} Ray nodes run on {host}, and engines timed together on one "
                "machine would slow each other; keep one node on each machine",
            )  # fmt: skip
    return [
        Slot(
            {
                "num_cpus": node["Resources"].get("CPU", 1),
                "scheduling_strategy": make_affinity(node["NodeID"], soft=False),
            },
            node["NodeID"],
        )
        for node in alive
    ]
