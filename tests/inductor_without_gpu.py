"""A GPU that is not there: an H100's properties for Inductor, and in Triton's interpreter functions of `libdevice`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.scheduler
import torch.utils._triton
import triton
import triton.language as tl
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties

H100 = {"major": 9, "multi_processor_count": 132, "max_threads_per_multi_processor": 2048, "warp_size": 32}
H100 |= {"regs_per_multiprocessor": 65536}


@contextmanager
def h100() -> Iterator[None]:
    properties = SimpleNamespace(name="NVIDIA H100", minor=0, total_memory=80 << 30, **H100)
    instead = (
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (DeviceProperties, "create", lambda device: DeviceProperties("cuda", 0, cc=90, **H100)),
        (torch._inductor.scheduler, "has_triton", lambda *device: True),
        (torch.utils._triton, "triton_hash_with_backend", lambda: ""),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (joint_graph, "lazy_init", lambda *device: None),  # patterns of products and attention, traced on the device
    )
    with ExitStack() as stack:
        stack.enter_context(config.patch(joint_graph_constant_folding=False))  # which computes on the device
        for place, name, value in instead:
            stack.enter_context(mock.patch.object(place, name, value))
        yield


# of the GPU's library of functions, which Triton's interpreter lacks, what the tests need


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def erf(x):
    return tl.erf(x)


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1
