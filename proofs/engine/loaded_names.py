"""Record which tensors of a checkpoint an engine reads; a model may silently drop some.

A tensor is read when an operation other than a view takes data from it in ``load_weights``.
"""

import bisect
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Place = tuple[str, int, int, str]


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.yielded: list[str] = []
        self.read: set[str] = set()
        self._places: list[Place] = []
        self._kept: list[torch.Tensor] = []  # so that no address is used twice

    def hand_out(
        self, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            self.yielded.append(name)
            self._kept.append(tensor)
            if size:
                bisect.insort(self._places, (str(tensor.device), start, start + size, name))
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            for value in tree_leaves((args, kwargs or {})):
                if isinstance(value, torch.Tensor):
                    self._note(value)
        return func(*args, **(kwargs or {}))

    def _note(self, value: torch.Tensor) -> None:
        if value.is_meta or not value.numel():
            return
        device, start = str(value.device), value.data_ptr()
        index = bisect.bisect_right(self._places, (device, start, float("inf"), "")) - 1
        if index >= 0:
            owner_device, _, end, name = self._places[index]
            if owner_device == device and start < end:
                self.read.add(name)


def install(loads: list[dict[str, Any]]) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights

    def load_weights(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        reads, own = Reads(), self.get_all_weights
        self.get_all_weights = lambda *a, **k: reads.hand_out(own(*a, **k))
        try:
            with reads:
                load(self, model, *args, **kwargs)
        finally:
            del self.get_all_weights
        loads.append(
            {
                "model": type(model).__name__,
                "yielded": sorted(reads.yielded),
                "read": sorted(reads.read),
            }
        )

    DefaultModelLoader.load_weights = load_weights
