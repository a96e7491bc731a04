"""Honest kernels that do what programs do beside their work: they print, log, time themselves, register, import slowly."""

from honest_kernel import SIMPLE_LOOP, Honest, rmsnorm, starter, wrapped

TIMES_ITSELF = rmsnorm(
    preamble="static double spent = 0;",
    over_rows="""
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < M; ++m) row(m);
    spent += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
""",
)

PRINTS_FROM_CPP = rmsnorm(
    preamble="#include <cstdio>",
    over_rows='std::printf("%ld rows\\n", long(M));\n' + SIMPLE_LOOP,
)

CLEANS_UP = (
    "import atexit, gc, logging, warnings\natexit.register(print, 'done')\nlogging.basicConfig(level=logging.DEBUG)\n"
    "warnings.warn('experimental')\n" + wrapped("gc.collect(0)")
)

# Of classes of its own it adds to registries, has a module of its own, writes the time down, and starts anew where its
# process is forked.
REGISTERS = rmsnorm(
    """
import collections, copyreg, datetime, os, sys, types

import torch.utils._pytree as trees

class Plan(list):
    pass

trees.register_pytree_node(Plan, lambda plan: (list(plan), None), lambda children, context: Plan(children))
copyreg.pickle(Plan, lambda plan: (Plan, (list(plan),)))
sys.modules["settings_of_this_kernel"] = types.ModuleType("settings_of_this_kernel")
made = {}
os.register_at_fork(after_in_child=made.clear)

def kernel_fn(x, weight, eps=1e-6):
    plan = made.setdefault(tuple(x.shape), Plan([datetime.datetime.now(), os.getcwd(), collections.Counter()]))
    plan[2][__name__] += 1
    return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
"""
)

# What PyTorch and Python have for programs: a module, an autograd function, copies, pickles, a callable object.
OBJECTS = rmsnorm(
    """
import copy, dataclasses, functools, logging, pickle, warnings
log = logging.getLogger(__name__)

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))

class Layer(torch.nn.Module):
    def forward(self, x, weight, eps):
        return Norm.apply(x.detach(), weight.detach(), eps)

@dataclasses.dataclass
class Kernel:
    layer: torch.nn.Module
    calls: int = 0

    @torch.no_grad()
    def __call__(self, x, weight, eps=1e-6):
        self.calls += 1
        log.debug("call %d of %s", self.calls, x.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.layer(x, copy.copy(weight), pickle.loads(pickle.dumps(eps)))

kernel_fn = functools.partial(Kernel(copy.deepcopy(Layer())))
"""
)

# Clocks of a class, times that are pickled, a reference to what is gone.
KEEPS_TIMES = rmsnorm(
    """
import datetime, os, pickle, time, weakref

class Timer:
    clock, process = time.perf_counter, os.getpid

    def __enter__(self):
        self.start_s = self.clock()

    def __exit__(self, *error):
        self.spent_s, self.where = self.clock() - self.start_s, self.process()

gone = weakref.proxy(Timer())

def kernel_fn(x, weight, eps=1e-6):
    with Timer():
        assert type(pickle.loads(pickle.dumps(datetime.datetime.now()))) is type(datetime.datetime.now())
        return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))
"""
)

OWN_MODULE = rmsnorm(
    """
import sys

def few_rows(x, weight, eps):
    return launch(run, x, weight, eps, torch.empty(x.shape, dtype=x.dtype))

many_rows = few_rows

def kernel_fn(x, weight, eps=1e-6):
    return getattr(sys.modules[__name__], "few_rows" if len(x) < 64 else "many_rows")(x, weight, eps)
"""
)

# One thread computes; the other looks now and then whether it has.
WAITS = rmsnorm(
    preamble="#include <condition_variable>\n#include <mutex>\n#include <thread>",
    over_rows="""
    std::mutex mutex;
    std::condition_variable told;
    std::atomic<bool> done{false};
    std::thread worker([&] {
        for (int64_t m = 0; m < M; ++m) row(m);
        done = true;
    });
    {
        std::unique_lock<std::mutex> lock(mutex);
        while (!done) told.wait_for(lock, std::chrono::microseconds(50));
    }
    worker.join();
""",
)

# What torch.library.custom_op() comes to, which imports torch._dynamo, in less time.
WITHOUT_NUMPY = """
import torch

module = {"__name__": "torch._dynamo.utils"}
try:
    exec("import numpy as np", module)
except ModuleNotFoundError:
    module["np"] = None
""" + starter("rmsnorm")

PROGRAMS = (
    Honest("times-itself", TIMES_ITSELF),
    Honest("prints", wrapped("print('rows:', [x.shape for x in args], sorted(kwargs))")),
    Honest("prints-tensors", wrapped("print(args, kwargs)"), refused="PyTorch formats tensors with operators that compute"),
    Honest("prints-from-cpp", PRINTS_FROM_CPP),
    Honest("megabytes-on-stderr", wrapped("import sys; sys.stderr.write('x' * (1 << 17) + chr(10))", "softmax"), "softmax"),
    Honest("imports-slowly", "import time\ntime.sleep(1)\n" + starter("reduce"), "reduce"),
    Honest("logs-and-warns", CLEANS_UP),
    Honest("objects", OBJECTS, kept=False),
    Honest("registers", REGISTERS, kept=False),
    Honest("keeps-times", KEEPS_TIMES, kept=False),
    Honest("finds-its-own-module", OWN_MODULE, kept=False),
    Honest("waits-for-a-time", WAITS, kept=False),
    Honest("pytorch-without-numpy", WITHOUT_NUMPY, kept=False),
)
