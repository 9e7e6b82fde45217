"""A GPU that is pretended: tensors say that they are on cuda:0, are computed by the CPU, and refuse to meet the CPU's as a GPU's would.

What no machine of the project's CI has, a program can still be tried on: whether a tensor was left behind on the other side,
whether what comes back is fetched, and whether `cuda` is what a device is asked for. It tells nothing about kernels and speed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import thread as pools
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
_GIB = 2**30
# Their indices may lie on the CPU, as on a real GPU.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class _Building(threading.local):
    """Whether a model is being made, when `meta` means what it says. Elsewhere it is what C++ sees of a pretended tensor."""

    def __init__(self) -> None:
        self.depth = 0


_building = _Building()


def _is_gpu(device: Any) -> bool:
    if device is None:
        return False
    kind = torch.device(device).type
    return kind == "cuda" or (kind == "meta" and not _building.depth)


class PretendedTensor(torch.Tensor):
    """Wraps a tensor of the CPU. C++ sees a tensor of the device `meta`, which has no streams that autograd would wait for."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> PretendedTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            layout=plain.layout,
            device="meta",
            requires_grad=plain.requires_grad,
        )

    def __init__(self, plain: Tensor) -> None:
        self.plain = plain

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    def _exchange(self, value: PretendedTensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.plain = value.plain

    data = property(lambda self: torch.Tensor.data.__get__(self), _exchange)  # type: ignore[assignment,attr-defined]

    def get_device(self) -> int:
        """As a tensor of the first GPU."""
        return 0

    def tolist(self) -> Any:
        """Fetches the values, as a GPU's does."""
        return self.plain.tolist()

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.plain})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation of ATen."""
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Catches what makes tensors on a GPU. With this key torch does not look for a driver first."""

    def __init__(self) -> None:
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, PretendedTensor) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    ours = [value for value in leaves if isinstance(value, PretendedTensor)]
    name = func.overloadpacket.__name__
    device = kwargs.get("device")
    options = {key: value for key, value in tree_map(_plain, kwargs).items() if key != "pin_memory" or not value}
    if _is_gpu(device):
        options["device"] = torch.device("cpu")
    if name == "copy_":  # between devices
        func(*tree_map(_plain, args), **options)
        return args[0]
    if name != "_to_copy":
        _check_devices(func, name, args, leaves, ours)
    if func is torch.ops.aten.mm.dtype:  # which the CPU does not have
        left, right, kind = tree_map(_plain, args)
        result = left.to(kind) @ right.to(kind)
    else:
        result = func(*tree_map(_plain, args), **options)
    on_gpu = _is_gpu(device) if device is not None else bool(ours)
    known = {id(value.plain): value for value in ours}  # an operation in place returns what it was given

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, PretendedTensor):
            return value
        if id(value) in known:
            return known[id(value)]
        return PretendedTensor(value) if on_gpu else value

    return tree_map(wrapped, result)


def _check_devices(func: Any, name: str, args: Any, leaves: list[Any], ours: list[PretendedTensor]) -> None:
    """Raise RuntimeError, as a GPU does, where tensors of the CPU with a dimension meet others."""
    if not ours:
        return
    indices = {id(value) for value in args[1]} if name in _INDEXING else set()
    for value in leaves:
        ordinary = isinstance(value, Tensor) and not isinstance(value, PretendedTensor)
        if ordinary and value.dim() and value.device.type == "cpu" and id(value) not in indices:
            raise RuntimeError(
                f"{func}: expected all tensors on the same device, found cuda:0 and cpu {tuple(value.shape)}"
            )


def _without_gradients(self: Any) -> None:
    self.before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)


def _with_gradients_again(self: Any, *_: Any) -> None:
    torch.set_grad_enabled(self.before)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Inside, torch has one GPU of 80 GiB, in this thread and in those that begin."""
    properties = SimpleNamespace(
        total_memory=80 * _GIB, major=9, minor=0, multi_processor_count=132, name="pretended GPU"
    )
    answers = {  # its capability is that of a card too old for kernels over sequences, which have no stand-in here
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
        "set_per_process_memory_fraction": None, "empty_cache": None, "synchronize": None,
        "mem_get_info": (70 * _GIB, 80 * _GIB), "get_device_capability": (7, 5), "is_bf16_supported": True,
        "manual_seed_all": None, "get_device_name": "pretended GPU", "reset_peak_memory_stats": None,
        "max_memory_allocated": _GIB, "memory_allocated": 0,
    }  # fmt: skip
    make_tensor, begin, work = torch.tensor, threading.Thread.run, pools._WorkItem.run

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        fetched = tree_map(lambda value: value.tolist() if isinstance(value, PretendedTensor) else value, data)
        made = make_tensor(fetched, **options)  # with a device it would look for the driver
        return made if device is None else made.to(device)

    def thread(self: threading.Thread) -> None:
        # Those of a pool may outlive the GPU: they are given it task by task.
        with nullcontext() if getattr(self, "_target", None) is pools._worker else _Mode():  # type: ignore[attr-defined]
            begin(self)

    def task(self: Any) -> None:
        with _Mode():
            work(self)

    from transformers import PreTrainedModel

    from_pretrained = PreTrainedModel.from_pretrained.__func__

    def load(cls: Any, *args: Any, **options: Any) -> Any:
        _building.depth += 1
        try:
            return from_pretrained(cls, *args, **options)
        finally:
            _building.depth -= 1

    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    # Else `module.to` makes new parameters, and ties between them are lost.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(mock.patch(f"torch.cuda.{name}", lambda *_, _answer=answer, **__: _answer))
            stack.enter_context(mock.patch("torch.tensor", tensor))
            # Views of wrapped tensors cannot be made in inference mode.
            stack.enter_context(mock.patch.object(torch.inference_mode, "__enter__", _without_gradients))
            stack.enter_context(mock.patch.object(torch.inference_mode, "__exit__", _with_gradients_again))
            stack.enter_context(mock.patch.object(threading.Thread, "run", thread))
            stack.enter_context(mock.patch.object(pools._WorkItem, "run", task))
            stack.enter_context(mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(load)))
            stack.enter_context(_Mode())
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
