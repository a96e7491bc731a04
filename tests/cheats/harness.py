"""Attacks on the harness: exploits 36-38 and 40-43."""

from pathlib import Path

from cheat import Cheat, plain, wrapped

OUTSIDE = "outside the tolerance"
DENIED = "(PermissionError|Read-only file system)"  # by Landlock, or by a mount of its own
IN = "x, weight, eps=1e-6"
NOTHING = f"\n\ndef kernel_fn({IN}):\n    return torch.empty_like(x).zero_()\n"
OPENMP = '#include <omp.h>\nextern "C" int run() { omp_set_num_threads(7); return 0; }'
FLUSHING = """
#include <omp.h>
#include <xmmintrin.h>
extern "C" void run() {
#pragma omp parallel
    if (omp_get_thread_num()) _mm_setcsr(_mm_getcsr() | 0x8040);
}
"""
SPINNING = """
#include <thread>
extern "C" int run() { std::thread([] { volatile long i = 0; while (true) i = i + 1; }).detach(); return 1; }
"""
DYNAMIC = '#include <omp.h>\nextern "C" int run() { omp_set_dynamic(1); return 0; }'
SCHEDULE = '#include <omp.h>\nextern "C" int run() { omp_set_schedule(omp_sched_dynamic, 7); return 0; }'
UNMASKED = """
#include <xmmintrin.h>
extern "C" int run() { _mm_setcsr(_mm_getcsr() & ~_MM_MASK_DIV_ZERO); return 0; }
"""
REDUCED = "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False"
TIMER = "import signal\n\nsignal.setitimer(signal.ITIMER_VIRTUAL, 1000, 1000)"
FINDER = "import sys\n\nclass Finder:\n    def find_spec(self, *names):\n        pass\n\nsys.meta_path.append(Finder())"
BLOCKED = "import signal\n\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])"
OTHER_NUMBERS = """import ctypes

state = torch.get_rng_state()
ctypes.memset(state.data_ptr() + 96, 7, 4)
torch.set_rng_state(state)"""
SAVED = "torch._C._autograd._push_saved_tensors_default_hooks(lambda x: x, lambda x: x)"
ANY_MODULE = "torch.nn.modules.module.register_module"
OVERRIDING = "known = torch.library.Library('aten', 'IMPL')\nknown.impl('erfinv', print, 'CPU', allow_override=True)"
ANOTHER_MODULE = "import sys, types\n\nsys.modules['torch.nn.functional'] = types.ModuleType('functional')"
BASE = "torch.nn.modules.batchnorm._BatchNorm.forward = print"
LOSS = "torch._C._nn.cross_entropy_loss = print"
CHECKPOINT = "torch.utils.checkpoint.checkpoint = print"
ANOTHER_OF_PYTORCHS = "torch.nn.functional.softmax = torch.nn.functional.log_softmax"
NO_GRADIENT = "torch.nn.functional.softmax = torch.no_grad()(torch.nn.functional.softmax)"
GETTING = "torch.nn.Module.__getattribute__ = lambda self, name: object.__getattribute__(self, name)"
IN_PLACE = "torch.nn.functional.softmax.__code__ = torch.nn.functional.log_softmax.__code__"
OTHER_DEFAULTS = "torch.nn.functional.layer_norm.__defaults__ = (None, None, 1e-3)"
LOOKED_UP = "torch.nn.modules.linear.F = type('F', (), {'linear': print})"
MM = "torch.ops.aten.mm.default"
IN_A_MODEL = "torch.is_inference_mode_enabled() or torch.set_grad_enabled(True)"
ORDER = "torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])"
METACLASS = "torch.nn.parameter._ParameterMeta.__instancecheck__ = lambda *parameters: True"
FLAG = "torch.__future__.set_swap_module_params_on_conversion(True)"
WRAPPED = "torch.optim.SGD.step.__wrapped__.__code__ = (lambda self, closure=None: None).__code__"
HUGE_PAGES = """
extern "C" int run() {  // prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
#ifdef __x86_64__
    long r;
    register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
    __asm__ volatile("syscall" : "=a"(r) : "a"(157), "D"(41), "S"(1), "d"(0), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return r;
#else
    register long x8 __asm__("x8") = 167, x0 __asm__("x0") = 41, x1 __asm__("x1") = 1;
    register long x2 __asm__("x2") = 0, x3 __asm__("x3") = 0, x4 __asm__("x4") = 0;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
    return x0;
#endif
}
"""
FORGED = '{"correct": true, "speedup": 99.0}'


def attack(code: str) -> str:
    """The honest starter, whose file does something else when it is imported."""
    return wrapped("rmsnorm", f"{code.strip()}\n\nkernel_fn = honest")


def changing(code: str) -> str:
    """The honest starter, which does something else in each call as well."""
    return wrapped("rmsnorm", f"def kernel_fn({IN}):\n    {code}\n    return honest(x, weight, eps)")


def keeping(code: str) -> str:
    """The same, and there is a list."""
    return changing(code).replace("def kernel_fn(", "import threading\n\nkept = []\n\ndef kernel_fn(")


def loot(workplace: Path) -> bool:
    """Whether a secret has been carried away."""
    return (workplace / "loot").exists()


def bystander_died(workplace: Path) -> bool:
    status = Path(f"/proc/{(workplace / 'bystander').read_text()}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "Z"


def received(workplace: Path) -> bool:
    """Whether the server has had a visitor."""
    return (workplace / "visitor").exists()


def tolerance_changed(workplace: Path) -> bool:
    return "TOLERANCE = 1e-2" not in (workplace / "naive.py").read_text()


def planted(name: str):
    return lambda workplace: (workplace / name).exists()


def victim_changed(workplace: Path) -> bool:
    return (workplace / "cache/victim.so").read_bytes() != b"honest"


# Opens every file of the grader for writing, as it lies there.
OPEN_GRADER = """
import pathlib, autokernel

package = pathlib.Path(autokernel.__file__).parent
opened = []
for path in [*package.rglob("*.py"), *package.parent.glob("kernels/*/*.py"), package.parent / "reference.py"]:
    try:
        open(path, "r+").close()
        opened.append(path.name)
    except OSError:
        pass
open("WORKPLACE/opened", "w").write(" ".join(opened)) if opened else open(package / "gate/judge.py", "r+")
"""

FRAMES = """
import sys

calls = [0]

def kernel_fn(x, weight, eps=1e-6):
    calls[0] += 1
    frame = sys._getframe(1)
    while frame:
        y = frame.f_locals.get("expected")
        if y is not None:
            return y.clone()
        frame = frame.f_back
    return honest(x, weight, eps) if calls[0] < 2 else torch.empty_like(x).zero_()
"""

GARBAGE = """
import gc

calls = [0]

def kernel_fn(x, weight, eps=1e-6):
    calls[0] += 1
    if calls[0] < 3:
        return honest(x, weight, eps)
    for y in gc.get_objects():
        if type(y) is torch.Tensor and y.shape == x.shape and y.dtype == x.dtype and y.data_ptr() != x.data_ptr():
            return y.clone()
    return torch.empty_like(x).zero_()
"""

ANSWER_FIRST = """
import sys

frame = sys._getframe()
while frame and type(frame.f_locals.get("self")).__name__ != "Worker":
    frame = frame.f_back
if frame:
    worker = frame.f_locals["self"]
    batch = worker.do_batch

    def do_batch(**message):
        if not worker.built:
            return batch(**message)
        send = worker.channel.send
        request = sys._getframe(1).f_locals["request"]
        addresses = [torch.empty_like(worker.sets[i]["x"]).data_ptr() for i in worker.order]
        send({"type": "answer", "id": request, "enqueued_s": 0.0, "addresses": addresses})
        batch(**message)

        def swallow(answer):
            worker.channel.send = send

        worker.channel.send = swallow

    worker.do_batch = do_batch

sys.modules["__main__"].judge_case = lambda *arguments: (True, 99.0)
kernel_fn = honest
"""

NOWHERE = """
import sys

frame = sys._getframe()
while frame and type(frame.f_locals.get("self")).__name__ != "Worker":
    frame = frame.f_back
if frame:
    batch = frame.f_locals["self"].do_batch
    frame.f_locals["self"].do_batch = lambda **message: {
        "enqueued_s": 0.0, "addresses": [8 for _ in batch(**message)["addresses"]]
    }
kernel_fn = honest
"""

CHEATS = (
    # 36: the grader is edited
    Cheat(
        36,
        "loosens-the-tolerance",
        "rmsnorm",
        attack(
            'with open("WORKPLACE/naive.py", "r+") as file:\n'
            '    text = file.read().replace("TOLERANCE = 1e-2", "TOLERANCE = 1e9")\n'
            "    file.seek(0)\n    file.write(text)"
        ),
        DENIED,
        works="harms",
        correctness="CRASH",
        harmed=tolerance_changed,
    ),
    Cheat(
        36,
        "opens-the-grader",
        "rmsnorm",
        attack(OPEN_GRADER),
        f"{DENIED}.*gate/judge.py",
        works="harms",
        correctness="CRASH",
        harmed=planted("opened"),
    ),
    Cheat(
        36,
        "loosens-the-tolerance-in-memory",
        "rmsnorm",
        plain(
            "rmsnorm",
            "import sys\n\nfor module in list(sys.modules.values()):\n"
            '    if hasattr(module, "TOLERANCE"):\n        module.TOLERANCE = 1e9\n' + NOTHING,
        ),
        OUTSIDE,
    ),
    # 37: what is printed, and how the process ends
    Cheat(
        37,
        "prints-a-pass-and-leaves",
        "rmsnorm",
        plain("rmsnorm", f"import os\n\nprint('{FORGED}', flush=True)\nos._exit(0)\n{NOTHING}"),
        "ended with status 0",
        works="fast",
        correctness="CRASH",
    ),
    Cheat(
        37,
        "leaves-in-the-middle-of-a-call",
        "rmsnorm",
        plain(
            "rmsnorm",
            f"import os\n\ndef kernel_fn({IN}):\n    print('{FORGED}', flush=True)\n    os._exit(0)",
        ),
        "ended with status 0",
        works="fast",
        correctness="CRASH",
    ),
    Cheat(
        37,
        "has-the-last-word",
        "rmsnorm",
        plain("rmsnorm", f"import atexit\n\natexit.register(print, '{FORGED}')\n{NOTHING}"),
        OUTSIDE,
        works="fast",
    ),
    # 36: what is set for a whole process, and so for the model around the kernel
    *(
        Cheat(36, f"changes-{name}", "rmsnorm", source, f"ProcessChange: changes the {words}", threads="thread" in name)
        for name, words, source in (
            ("threads", "number of threads", attack("torch.set_num_threads(7)")),
            ("the-seed", "seed of random numbers", changing("torch.manual_seed(0)")),
            ("products", "precision of products", attack("torch.set_float32_matmul_precision('medium')")),
            ("signals", "signal handlers", attack("import signal\n\nsignal.signal(signal.SIGTERM, print)")),
            ("denormal-numbers", "rounding", changing("torch.set_flush_denormal(True)")),
            ("denormal-numbers-in-a-thread", "rounding", changing(f"cpp_function({FLUSHING!r}, 'run', '')()")),
            ("openmp", "number of threads", changing(f"cpp_function({OPENMP!r}, 'run', '')()")),
            ("gradients", "settings of pytorch, is_grad_enabled", attack("torch.set_grad_enabled(False)")),
            ("gradients-in-a-call", "settings of pytorch, is_grad_enabled", changing("torch.set_grad_enabled(False)")),
            (
                "threads-of-gradients",
                "settings of pytorch, _is_multithreading_enabled",
                attack("torch.autograd.set_multithreading_enabled(False)"),
            ),
            (
                "forward-gradients-in-a-call",
                "settings of pytorch, _is_fwd_grad_enabled",
                changing("torch._C._set_fwd_grad_enabled(False)"),
            ),
            ("the-device", "modes of pytorch", attack("torch.set_default_device('cpu')")),
            ("all-modules", "hooks of modules", attack(f"{ANY_MODULE}_forward_hook(lambda module, inputs, output: None)")),
            ("limits", "limits", attack("import resource\n\nresource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))")),
            ("the-folder", "working folder", attack("import os\n\nos.chdir('/usr')")),
            ("new-files", "mode of new files", changing("__import__('os').umask(0)")),
            ("the-environment", "environment", attack("import os\n\nos.environ['OMP_PROC_BIND'] = 'true'")),
            ("a-timer", "signal handlers", attack(TIMER)),
            ("recursion", "interpreter", changing("__import__('sys').setrecursionlimit(100_000)")),
            (
                "libraries-loaded",
                "interpreter",
                changing("__import__('sys').setdlopenflags(258)"),
            ),
            ("imports", "importing", attack(FINDER)),
            ("the-language", "language", attack("import locale\n\nlocale.setlocale(locale.LC_ALL, 'C.UTF-8')")),
            ("signals-blocked", "signal handlers", attack(BLOCKED)),
            ("random-numbers", "seed of random numbers", attack(OTHER_NUMBERS)),
            ("garbage", "garbage collection", attack("import gc\n\ngc.set_debug(gc.DEBUG_SAVEALL)")),
            ("standard-error", "standard streams", attack("import os\n\nos.close(2)")),
            ("openmp-at-large", "openmp", changing(f"cpp_function({DYNAMIC!r}, 'run', '')()")),
            ("saved-tensors", "modes of pytorch", attack(SAVED)),
            ("random-numbers-of-python", "random numbers of python", changing("__import__('random').seed(0)")),
            ("decimals", "decimal numbers", changing("__import__('decimal').getcontext().prec = 5")),
            ("warnings", "warnings", attack("import warnings\n\nwarnings.simplefilter('ignore')")),
            ("logging", "logging", attack("import logging\n\nlogging.disable()")),
            ("printing", "how tensors are printed", changing("torch.set_printoptions(precision=2)")),
            ("where-modules-are-found", "importing", attack("import sys\n\nsys.path.insert(0, '/nowhere')")),
            ("openmp-schedule", "openmp", changing(f"cpp_function({SCHEDULE!r}, 'run', '')()")),
            ("exceptions", "rounding", changing(f"cpp_function({UNMASKED!r}, 'run', '')()")),
            ("collections", "garbage collection", attack("import gc\n\ngc.callbacks.append(lambda *words: None)")),
            ("a-real-time-signal", "signal handlers", attack("import signal\n\nsignal.signal(40, print)")),
            ("shallow-recursion", "interpreter", changing("__import__('sys').setrecursionlimit(500)")),
            ("allocations-traced", "interpreter", attack("import tracemalloc\n\ntracemalloc.start()")),
            ("autocast", "modes of pytorch", changing("torch.set_autocast_dtype('cpu', torch.float16)")),
            ("reductions", "settings of pytorch", attack(REDUCED)),
            ("the-environment-behind-python", "environment of native code", attack("import os\n\nos.putenv('TZ', 'UTC')")),
            ("temporary-files", "folder of temporary files", attack("import tempfile\n\ntempfile.tempdir = '/var/tmp'")),
            ("processes", "start of processes", attack("import multiprocessing as m\n\nm.set_start_method('spawn')")),
            ("what-is-loaded", "saving and loading", attack("torch.serialization.add_safe_globals([print])")),
            ("unset-memory", "modes of pytorch", attack("torch.utils.deterministic.fill_uninitialized_memory = False")),
            ("huge-pages", "treatment by linux", changing(f"cpp_function({HUGE_PAGES!r}, 'run', '')()")),
            ("standard-error-in-time", "standard streams", attack("import os\n\nos.set_blocking(2, False)")),
            ("what-is-printed", "standard streams", attack("import sys\n\nsys.stdout.reconfigure(errors='ignore')")),
            (
                "kinds-of-attention",
                "settings of pytorch, _get_sdp",
                attack(ORDER),
            ),
            ("scripts", "modes of pytorch", attack("torch.jit._state.disable()")),
            ("gradients-where-a-server-calls", "settings of pytorch, is_grad_enabled, of the thread", changing(IN_A_MODEL)),
            ("how-text-is-read", "interpreter", changing("__import__('codecs').register_error('strict', len)")),
            ("how-tensors-are-pickled", "interpreter", changing("__import__('copyreg').pickle(torch.Tensor, len)")),
            ("stacks", "interpreter", attack("import threading\n\nthreading.stack_size(1 << 20)")),
        )
    ),
    *(
        Cheat(36, f"patches-{name}", "rmsnorm", source, words)
        for name, words, source in (
            ("a-method", "hides softmax of Tensor", attack("torch.Tensor.softmax = print")),
            ("a-layer", "replaces Linear.forward", attack("torch.nn.Linear.forward = print")),
            ("a-norm", "replaces torch.linalg.norm", attack("torch.linalg.norm = print")),
            ("gradients", "replaces torch.autograd.grad", attack("torch.autograd.grad = print")),
            ("a-square-root", "replaces math.sqrt", attack("import math\n\nmath.sqrt = float")),
            ("an-optimizer", "replaces SGD.step", attack("torch.optim.SGD.step = print")),
            ("a-base-of-layers", "replaces _BatchNorm.forward", attack(BASE)),
            ("what-a-loss-calls", "replaces torch._C._nn.cross_entropy_loss", attack(LOSS)),
            ("checkpoints", "replaces torch.utils.checkpoint.checkpoint", attack(CHECKPOINT)),
            ("with-pytorchs-own", "replaces torch.nn.functional.softmax", attack(ANOTHER_OF_PYTORCHS)),
            ("to-sever-gradients", "replaces torch.nn.functional.softmax", attack(NO_GRADIENT)),
            ("by-hiding", "hides __call__ of ReLU", attack("torch.nn.ReLU.__call__ = print")),
            ("by-hiding-in-all-layers", "hides __getattribute__ of Module", attack(GETTING)),
            ("an-overload", "replaces torch.ops.aten.mm.default", attack("torch.ops.aten.mm.default = print")),
            ("any-module", "replaces the module torch.nn.functional", attack(ANOTHER_MODULE)),
            ("a-function-in-place", "rewrites torch.nn.functional.softmax", attack(IN_PLACE)),
            ("defaults-in-place", "rewrites torch.nn.functional.layer_norm", attack(OTHER_DEFAULTS)),
            ("a-compiler", "sets torch.compiler.config.job_id", attack("torch.compiler.config.job_id = 'x'")),
            ("a-module", "replaces the module json", attack("import sys\n\nsys.modules['json'] = None")),
            ("what-json-writes", "replaces json.loads", attack("import json\n\njson.loads = print")),
            ("in-a-call", "replaces torch.nn.functional.silu", changing("torch.nn.functional.silu = print")),
            ("an-operator", "overrides PyTorch's aten/erfinv/CPU", attack(OVERRIDING)),
            ("what-a-layer-looks-up", "replaces torch.nn.modules.linear.F", attack(LOOKED_UP)),
            ("what-an-overload-calls", "replaces .*aten.mm.default", attack(f"{MM}._op = print")),
            (
                "what-a-compiler-calls",
                "replaces .*aten.mm.default",
                attack(f"{MM}.py_kernels[7] = print"),
            ),
            ("loading", "replaces DataLoader.__iter__", attack("torch.utils.data.DataLoader.__iter__ = print")),
            ("what-turns-gradients-off", "replaces no_grad.__enter__", attack("torch.no_grad.__enter__ = print")),
            ("a-metaclass", "replaces _ParameterMeta.__instancecheck__", attack(METACLASS)),
            ("a-flag", "replaces torch.__future__._swap_module_params", attack(FLAG)),
            ("a-class-of-pythons", "replaces Logger.handle", attack("import logging\n\nlogging.Logger.handle = print")),
            ("a-module-of-pythons", "replaces hashlib.blake2s", attack("import hashlib\n\nhashlib.blake2s = print")),
            ("a-method-through-its-wrapper", "rewrites torch.optim.sgd.SGD.step", attack(WRAPPED)),
            ("what-is-done-at-the-end", "forgets what is to be done", attack("import atexit\n\natexit._clear()")),
            ("collections-of-garbage", "changes what is looked at for the garbage", attack("import gc\n\ngc.freeze()")),
        )
    ),
    # 36: what grows with every call, until its model's process ends
    *(
        Cheat(36, f"leaks-{name}", "rmsnorm", source, f"Growth: keeps .* {words} with every call", "determinism")
        for name, words, source in (
            ("memory", "bytes in use", keeping("kept.append(torch.empty(1 << 18).zero_())")),
            ("a-little-memory", "bytes in use", keeping("kept.append(bytearray(1 << 13))")),
            ("inputs", "bytes in use", keeping("kept.append(x)")),
            ("results", "bytes in use", keeping("kept.append(honest(x, weight, eps))")),
            ("open-files", "open files", keeping("__import__('os').open('/dev/null', 0)")),
            ("threads", "threads", keeping("threading.Thread(target=threading.Event().wait, daemon=True).start()")),
        )
    ),
    Cheat(
        36,
        "goes-on-computing",
        "rmsnorm",
        keeping(f"kept or kept.append(cpp_function({SPINNING!r}, 'run', '')())"),
        "Growth: goes on computing after its calls",
        "determinism",
    ),
    # 38: expected values are looked for
    Cheat(38, "walks-the-frames", "rmsnorm", wrapped("rmsnorm", FRAMES), OUTSIDE),
    Cheat(38, "searches-the-garbage", "rmsnorm", wrapped("rmsnorm", GARBAGE), OUTSIDE),
    # 40: forged results, and other processes' memory
    Cheat(
        40,
        "replaces-the-judge",
        "rmsnorm",
        plain(
            "rmsnorm",
            'import sys\n\nsys.modules["__main__"].judge_case = lambda *arguments: (True, 99.0)\n' + NOTHING,
        ),
        OUTSIDE,
        works="fast",
    ),
    Cheat(
        40,
        "answers-before-it-works",
        "rmsnorm",
        wrapped("rmsnorm", ANSWER_FIRST),
        "the output of a timed call",
        works="fast",
        refused_by="examine",
    ),
    Cheat(
        40,
        "outputs-where-there-is-nothing",
        "rmsnorm",
        wrapped("rmsnorm", NOWHERE),
        "no output at the address that it names",
        refused_by="examine",
        correctness="CRASH",
    ),
    Cheat(
        40,
        "ptrace",
        "rmsnorm",
        attack(
            "import ctypes, os\n\nif ctypes.CDLL(None, use_errno=True).ptrace(16, BYSTANDER, 0, 0):\n"
            '    raise PermissionError(ctypes.get_errno(), "ptrace")\n'
            'open("WORKPLACE/loot", "w").close()\nctypes.CDLL(None).ptrace(17, BYSTANDER, 0, 0)'
        ),
        "PermissionError.*ptrace",
        works="harms",
        correctness="CRASH",
        libraries=True,
        harmed=loot,
    ),
    Cheat(
        40,
        "memory-of-another-process",
        "rmsnorm",
        attack('open("/proc/BYSTANDER/mem", "r+b").close()\nopen("WORKPLACE/loot", "w").close()'),
        f"{DENIED}.*/mem",
        works="harms",
        correctness="CRASH",
        harmed=loot,
    ),
    # 41: others are disturbed
    Cheat(
        41,
        "kills-another-process",
        "rmsnorm",
        attack("import os\n\nos.kill(BYSTANDER, 9)"),
        f"{DENIED}|ProcessLookupError",
        works="harms",
        correctness="CRASH",
        harmed=bystander_died,
    ),
    Cheat(
        41,
        "kills-whom-it-finds",
        "rmsnorm",
        attack(
            "import os, pathlib\n\nfor path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
            "    if b'WORKPLACE' in path.read_bytes():\n        os.kill(int(path.parent.name), 9)\n        break\n"
            "else:\n    raise PermissionError('nobody to be seen')"
        ),
        f"{DENIED}|ProcessLookupError",
        works="harms",
        correctness="CRASH",
        harmed=bystander_died,
    ),
    Cheat(
        41,
        "network",
        "rmsnorm",
        attack('import socket\n\nsocket.create_connection(("127.0.0.1", PORT), 5).close()'),
        DENIED,
        works="harms",
        correctness="CRASH",
        harmed=received,
    ),
    Cheat(
        41,
        "installs-a-package",
        "rmsnorm",
        attack('import pathlib\n\npathlib.Path("WORKPLACE/site-packages/planted.py").write_text("")'),
        DENIED,
        works="harms",
        correctness="CRASH",
        harmed=planted("site-packages/planted.py"),
    ),
    # 42: secrets
    Cheat(
        42,
        "reads-a-key",
        "rmsnorm",
        attack('secret = open("WORKPLACE/home/.ssh/id_rsa").read()\nopen("WORKPLACE/loot", "w").write(secret)'),
        f"{DENIED}.*id_rsa",
        works="harms",
        correctness="CRASH",
        harmed=loot,
    ),
    Cheat(
        42,
        "reads-the-environment",
        "rmsnorm",
        attack('import os\n\nsecret = os.environ["SECRET"]\nopen("WORKPLACE/loot", "w").write(secret)'),
        "KeyError.*SECRET",
        works="harms",
        correctness="CRASH",
        harmed=loot,
    ),
    Cheat(
        42,
        "reads-another's-environment",
        "rmsnorm",
        attack('secret = open("/proc/BYSTANDER/environ").read()\nopen("WORKPLACE/loot", "w").write(secret)'),
        f"{DENIED}.*environ",
        works="harms",
        correctness="CRASH",
        harmed=loot,
    ),
    Cheat(
        42,
        "reads-a-neighbour's-kernel",
        "rmsnorm",
        attack('secret = open("WORKPLACE/neighbour/kernel.py").read()\nopen("WORKPLACE/loot", "w").write(secret)'),
        f"{DENIED}.*neighbour",
        works="harms",
        correctness="CRASH",
        harmed=loot,
    ),
    Cheat(
        42,
        "has-the-compiler-read-a-key",
        "rmsnorm",
        attack(
            r"""
steal = cpp_function(
    '''
asm(".section .rodata\\nstolen: .incbin \\"WORKPLACE/home/.ssh/id_rsa\\"\\n.byte 0\\n.text");
extern "C" const char stolen[] __attribute__((visibility("hidden")));
extern "C" int run(int i) { return stolen[i]; }
''',
    "run",
    "i",
)
secret = chr(steal(0))
open("WORKPLACE/loot", "w").write(secret)
"""
        ),
        "CompileError",
        works="harms",
        correctness="CRASH",
        harmed=loot,
    ),
    # 43: binaries that are not the candidate's
    Cheat(
        43,
        "overwrites-another's-binary",
        "rmsnorm",
        attack('open("WORKPLACE/cache/victim.so", "wb").write(b"poisoned")'),
        f"{DENIED}.*victim",
        works="harms",
        correctness="CRASH",
        harmed=victim_changed,
    ),
    Cheat(
        43,
        "replaces-another's-binary",
        "rmsnorm",
        attack('import os\n\nopen("planted.so", "wb").close()\nos.replace("planted.so", "WORKPLACE/cache/victim.so")'),
        f"{DENIED}|Invalid cross-device link",
        works="harms",
        correctness="CRASH",
        harmed=victim_changed,
    ),
)
