"""What the work is done on: the shape of the model, its config, a device and how many of them. [ours]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flows.cost.rates import GPU, Rate
from flows.cost.shapes import Device, Shape


@dataclass(frozen=True)
class Machine:
    """rates: what turns work into hours (rates.py). cache_bytes: of a number in the KV cache; 0 = as the model's."""

    run: Any
    shape: Shape
    device: Device
    n: int
    rates: Mapping[str, Rate] = field(default_factory=lambda: GPU)
    cache_bytes: float = 0.0

    @property
    def itemsize(self) -> int:
        return 2 if self.run.model.dtype == "bfloat16" else 4

    @property
    def lora(self) -> int:
        return self.shape.lora(self.run.model.lora_rank)

    @property
    def weights(self) -> float:
        return float(self.shape.parameters * self.itemsize)

    @property
    def kv_bytes(self) -> float:
        """Of the KV cache, a token."""
        return self.shape.kv_bytes(self.cache_bytes or self.itemsize)

    @property
    def caches_prefixes(self) -> bool:
        return bool(self.run.model.engine != "hf")

    @property
    def trainers(self) -> int:
        """Devices that train together."""
        found: int = self.run.train.processes
        return found

    @property
    def sharded(self) -> bool:
        """Whether each of them holds a part of the layers."""
        return self.trainers > 1 and self.run.train.shard == "layers"

    @property
    def servers(self) -> int:
        """Devices that generate: those that do not train, or the same one."""
        return max(1, self.n - self.trainers) if self.run.model.engine == "openai" else 1

    @property
    def addresses(self) -> int:
        """Addresses that share the requests; 1 where the model is asked in this process."""
        model = self.run.model
        return 1 if model.engine != "openai" or isinstance(model.url, str) else len(model.url)

    @property
    def copies(self) -> int:
        """Copies of the model on the devices that generate: one behind each address."""
        return min(self.addresses, self.servers)

    @property
    def requests(self) -> float:
        """Most requests that the engine decodes at once, as far as its cache goes."""
        model, most = self.run.model, self.rate("requests")
        if model.engine == "openai":
            return min(most, float(model.concurrency)) * self.addresses
        return float(model.gen_batch) if model.engine == "hf" else most

    def named(self, rate: str) -> str:
        """The name in `rates.py`: of reading, of decoding and of a step each engine has its own."""
        return f"hf_{rate}" if self.run.model.engine == "hf" and rate in ("read", "decode", "step") else rate

    def rate(self, name: str) -> float:
        return self.rates[self.named(name)].value
