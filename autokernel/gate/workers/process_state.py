"""What a kernel leaves as it finds it: settings of a whole process, on which the model around the kernel depends.

A convenience for honest kernels, like all code in a worker. The gate's other processes do not notice what changes in this
one, but a model that runs the kernel would: in PyTorch's threads, in the precision of its products, in denormal numbers.
"""

import _imp
import abc
import builtins
import codecs
import collections.abc
import contextlib
import copyreg
import csv
import ctypes
import decimal
import enum
import faulthandler
import fcntl
import functools
import gc
import inspect
import itertools
import locale
import logging
import multiprocessing
import multiprocessing.spawn
import numbers
import os
import platform
import random
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn.modules import module as hooked

# Functions that say how PyTorch is set (is_grad_enabled, _get_cudnn_benchmark), but for what is no setting, or might touch
# a device in the warm parent.
NO_SETTINGS = (
    "jit|exception|version|upgrader|cache|thread_name|torch_function_enabled|accelerator|available|preferred|sequence"
)
SETTING_NAMES = re.compile(
    rf"(?!.*({NO_SETTINGS}))_?(get|is)_\w+|_jit_(?!.*nvfuser)\w+_(enabled|allowed)|_warn_on_\w+"
    r"|_only_lift_\w+|_override_stale_\w+"
    r"|_jit_(get|can)_(?!.*(operator|schema|nvfuser))\w+|_debug_get_\w+"
)
# Those that are set and of which nothing is said.
UNTOLD = [(torch._C._profiler, f"_set_{what}_enabled_val") for what in ("record_concrete_inputs", "fwd_bwd", "cuda_sync")]
UNTOLD += [(torch._C, f"_set_{what}") for what in ("cached_tensors_enabled", "should_use_format_with_string_table")]
UNTOLD += [(torch._C, "_set_skip_next_torch_function")]
SETTINGS_OF = torch._C, torch._C._autograd, torch._C._functorch  # what has such functions
VALUES = (bool, int, str, enum.Enum, torch.dtype, tuple, list)
SIGNALS = sorted(signal.valid_signals())
TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
# Variables that libraries set as they are imported, for themselves.
LIBRARIES_OWN = tuple(map(os.fsencode, ("TORCH", "PYTORCH", "TRITON", "CU", "NV", "KMP_INIT", "KMP_DUPLICATE")))
LEAST_RECURSION, RECURSION = 1000, 2000  # calls, between which the interpreter's limit lies: torch.compile raises it
# Warnings that are not a library's own: of these kinds, with any text, from a program's modules and from PyTorch's.
GENERAL = tuple(kind for kind in vars(builtins).values() if inspect.isclass(kind) and issubclass(kind, Warning))
TEXTS, WARNING_MODULES = ("", "a text that nobody knows"), ("model", "__main__", "torch.nn.modules.module")
PATHS = len(sys.path)
LINUX = sys.platform == "linux"
# Of x86-64's fenv_t: how its older unit rounds, and which of its registers are taken; MXCSR, and what results have raised.
X87, TAKEN, MXCSR, FLAGS = slice(0, 2), slice(8, 10), slice(28, 32), 0x3F
# C's standard streams, and C++'s beside std::cin, which read none: what they are called, and how many bytes all have.
STREAMS, STREAMS_OF_CPP = ("stdin", "stdout", "stderr"), ("_ZSt4cout", "_ZSt4cerr", "_ZSt4clog")
STREAM_BYTES, FILLED_WITH = 272, slice(232, 240)  # of a std::ostream of libstdc++'s; the latter is set as it is first used
# prctl(2): PR_GET_DUMPABLE, _KEEPCAPS, _TIMERSLACK, _THP_DISABLE (huge pages), PR_MCE_KILL_GET, PR_GET_MDWE, _MEMORY_MERGE,
# and what is written to an address: PR_GET_PDEATHSIG, _TSC, _CHILD_SUBREAPER, _TID_ADDRESS
TREATMENT, TREATMENT_TOLD, SPECULATION, SPECULATIONS = (3, 7, 30, 42, 34, 66, 68), (2, 25, 37, 40), 52, range(3)
CPUID, MAY_ASK = 158, 0x1011  # arch_prctl() of x86-64: whether the processor may be asked what it can do
# System calls that tell, on x86-64 and ARM: get_mempolicy, personality, ioprio_get of this process; get_robust_list and
# sigaltstack of this thread.
ASKING = {"x86_64": (239, 135, 252, 274, 131), "aarch64": (236, 92, 31, 100, 132)}.get(platform.machine(), ())
SCHEDULE = {"x86_64": 315, "aarch64": 275}.get(platform.machine(), 0) if LINUX else 0  # sched_getattr
OF_STATUS = "Name", "VmLck", "Seccomp", "Seccomp_filters", "NoNewPrivs"  # of /proc/self/status
RESTORER = 0x04000000  # SA_RESTORER, a flag of the C library's own
# What codecs do with what they cannot read or write, by Python's own names.
CODEC_ERRORS = "strict", "ignore", "replace", "xmlcharrefreplace", "backslashreplace", "namereplace", "surrogateescape"
STANDARD_OR_TORCH = {*sys.stdlib_module_names, "torch"}
LOGGERS = None, "torch"  # that of all, and PyTorch's
# What of PyTorch's may compute in fewer bits than fp32 has: each has a setting of its own from PyTorch 2.9 on.
PARTS = ("generic", "all"), *itertools.product(("mkldnn", "cuda"), ("all", "matmul", "conv", "rnn"))
PRECISION = [said for said in [getattr(torch._C, "_get_fp32_precision_getter", None)] if said]
LOCK_S = 1.0  # that a thread may be in a part where only one is
MOST_KEYS = 1024  # glibc's PTHREAD_KEYS_MAX
MONITORS = range(6)  # numbers of those that Python 3.12 and newer tell what a program does
HOOKS = [name for name in vars(hooked) if re.fullmatch(r"_global_\w+_hooks", name)]


class ProcessChange(RuntimeError):
    """A kernel changed a setting of its whole process."""


@dataclass(frozen=True)
class ProcessState:
    """How the process is set at one time. A refusal calls what changed by its field's name."""

    number_of_threads: int
    cores: frozenset[int]
    cores_of_threads: frozenset[int]  # that have others now than when they were first seen
    schedules_of_threads: frozenset[int]  # the same, of what tells Linux when they run
    default_dtype: torch.dtype
    precision_of_products: tuple[Any, ...]
    seed_of_random_numbers: tuple[int, int]
    rounding: tuple[float, ...]
    exceptions_of_cpp: tuple[Any, ...]
    signal_handlers: dict[str, Any]
    tracing: tuple[Any, ...]
    garbage_collection: tuple[Any, ...]
    limits: tuple[Any, ...]
    treatment_by_linux: tuple[Any, ...]
    mode_of_new_files: int
    environment: dict[bytes, bytes]
    environment_of_native_code: dict[bytes, bytes]
    working_folder: str
    standard_streams: tuple[Any, ...]
    interpreter: tuple[Any, ...]
    importing: tuple[Any, ...]
    random_numbers_of_python: int
    decimal_numbers: tuple[Any, ...]
    warnings: tuple[Any, ...]
    logging: tuple[Any, ...]  # up to which level nothing is logged, by anyone, and what else is left out
    how_tensors_are_printed: str
    language: str
    time_zone: tuple[Any, ...]
    abstract_classes: tuple[bool, ...]
    openmp: tuple[int, ...]
    hooks_of_modules: tuple[int, ...]
    modes_of_pytorch: tuple[Any, ...]
    saving_and_loading: tuple[Any, ...]
    device: tuple[Any, ...]
    folder_of_temporary_files: str
    start_of_processes: tuple[Any, ...]
    settings_of_pytorch: dict[str, Any]

    @staticmethod
    def now() -> "ProcessState":
        return ProcessState(
            number_of_threads=torch.get_num_threads(),
            cores=frozenset(os.sched_getaffinity(0)) if LINUX else frozenset(),
            cores_of_threads=_on_other_cores() if LINUX else frozenset(),
            schedules_of_threads=_on_other_schedules() if SCHEDULE else frozenset(),
            default_dtype=torch.get_default_dtype(),
            precision_of_products=(
                *(said(*part) for said in PRECISION for part in PARTS),
                *(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
            ),
            seed_of_random_numbers=(torch.initial_seed(), hash(_bytes_of(torch.get_rng_state()))),
            rounding=(*_rounding(), *_floating_point_control()),
            exceptions_of_cpp=_exceptions(),
            signal_handlers=_signal_handlers(),
            tracing=(sys.gettrace(), sys.getprofile(), threading._trace_hook, threading._profile_hook, *_monitors()),
            garbage_collection=(gc.isenabled(), gc.get_threshold(), gc.get_debug(), tuple(gc.callbacks)),
            limits=(*map(resource.getrlimit, LIMITS), os.sched_getscheduler(0) if LINUX else 0, os.getpriority(0, 0)),
            treatment_by_linux=_treatment() if LINUX else (),
            mode_of_new_files=_umask(),
            environment={k: v for k, v in os.environ._data.items() if not k.startswith(LIBRARIES_OWN)},
            environment_of_native_code=_environment(),
            working_folder=_working_folder(),
            standard_streams=(
                *map(_as_text, (sys.stdin, sys.stdout, sys.stderr)),
                *(sys.__stdin__, sys.__stdout__, sys.__stderr__),
                *map(_file_behind, range(3)),
                *(stream.value for stream in C_STREAMS),
                *map(_how_it_writes, CPP_STREAMS),
            ),
            interpreter=(
                *(_recursion(), sys.getswitchinterval(), sys.getdlopenflags(), sys.dont_write_bytecode, tuple(sys.argv)),
                *(tuple(sys.orig_argv), sys.executable, tuple(sys.warnoptions), tuple(sys._xoptions.items())),
                *(_imp.lock_held(), *_event_loops()),
                *(sys.get_coroutine_origin_tracking_depth(), sys.get_int_max_str_digits()),
                *(getattr(sys, "tracebacklimit", None), sys.pycache_prefix, socket.getdefaulttimeout()),
                *(faulthandler.is_enabled(), tracemalloc.is_tracing(), threading.stack_size()),
                getattr(sys, "is_stack_trampoline_active", bool)(),
                *(sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, *sys.get_asyncgen_hooks()),
                *map(codecs.lookup_error, (*CODEC_ERRORS, "surrogatepass")),
                *(kind for kind, reduce in copyreg.dispatch_table.items() if _is_anothers(kind, reduce)),
                *(tuple(copyreg._extension_registry), csv.field_size_limit()),
            ),
            importing=(
                *(finder for finder in (*sys.meta_path, *sys.path_hooks) if not _is_of_a_package(finder)),
                *sys.path[:PATHS],  # what is looked into after these hides nothing
                *filter(_is_not_looked_into, list(sys.path_importer_cache)),
            ),
            random_numbers_of_python=hash(random.getstate()),
            decimal_numbers=(*_of_decimals(decimal.getcontext()), *_of_decimals(decimal.DefaultContext)),
            warnings=(
                *_treatment_of_warnings(tuple(warnings.filters), warnings.defaultaction),
                warnings.showwarning,
                warnings.formatwarning,
                warnings.defaultaction,
            ),
            logging=(
                *(logging.root.manager.disable, logging.raiseExceptions, logging.lastResort, logging.getLogRecordFactory()),
                *(said for name in LOGGERS for said in _of_logger(logging.getLogger(name))),
            ),
            how_tensors_are_printed=repr(torch._tensor_str.PRINT_OPTS),
            language=locale.setlocale(locale.LC_ALL),
            time_zone=(*time.tzname, time.timezone, time.daylight),
            abstract_classes=_abstract_classes(abc.get_cache_token()),
            openmp=tuple(said() for said in OPENMP),
            hooks_of_modules=tuple(len(getattr(hooked, name)) for name in HOOKS),
            modes_of_pytorch=(
                *_modes(),
                torch._C._autograd._top_saved_tensors_default_hooks(False),
                *(torch.backends.mha.get_fastpath_enabled(), torch.backends.opt_einsum.enabled),
                *(torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()),
                *(torch.multiprocessing.get_sharing_strategy(), torch.hub._hub_dir, _stance()),
                *(torch.utils.deterministic.fill_uninitialized_memory, torch.jit._state._enabled.enabled),
                *(torch._C._check_sparse_tensor_invariants(), _autocast_nesting(), *_running_of_scripts()),
            ),
            saving_and_loading=_saving_and_loading(),
            device=_device(),
            folder_of_temporary_files=tempfile.gettempdir(),
            start_of_processes=(
                multiprocessing.get_start_method(allow_none=True) or START,
                multiprocessing.spawn.get_executable(),
                *multiprocessing.current_process()._config.items(),  # a daemon may start none
            ),
            settings_of_pytorch={name: said() for name, said in SETTINGS.items()},
        )

    def check(self) -> None:
        """Raises ProcessChange where the process is another now."""
        now = ProcessState.now()
        for field in fields(self):
            before, after = getattr(self, field.name), getattr(now, field.name)
            if before != after:
                name = field.name.replace("_", " ")
                if isinstance(before, dict):
                    name, before, after = next(
                        (f"{name}, {k},", before.get(k), after.get(k))
                        for k in (*before, *after)
                        if before.get(k) != after.get(k)
                    )
                what = f"changes the {name} of its process"
                raise ProcessChange(f"{what}, which is its model's: {after} instead of {before}")


def of_this_thread() -> dict[str, Any]:
    """The settings that each thread has of its own: the thread is the model's, too."""
    own = {"rounding": (*_rounding(), *_floating_point_control()), "modes of pytorch": _modes()}
    own["exceptions of cpp"] = _exceptions()
    return own | {f"settings of pytorch, {name}": said() for name, said in SETTINGS.items()}


def check_this_thread(before: dict[str, Any]) -> None:
    """Raises ProcessChange where it has others now than of_this_thread() said."""
    now = of_this_thread()
    for name in before:
        if now[name] != before[name]:
            what = f"changes the {name}, of the thread that calls it, which is its model's"
            raise ProcessChange(f"{what}: {now[name]} instead of {before[name]}")


def _modes() -> tuple[Any, ...]:
    """Of this thread: what is put between a call and PyTorch's operators, or is left out there, such as gradients."""
    return (
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_torch_function_enabled(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch.autograd.forward_ad._current_level,
        RECORDED and RECORDED(),
    )


def _monitors() -> tuple[Any, ...]:
    """The tools that sys.monitoring tells what a program does, and of which events."""
    told = getattr(sys, "monitoring", None)
    return tuple((told.get_tool(i), told.get_tool(i) and told.get_events(i)) for i in MONITORS) if told else ()


def _is_anothers(kind: type, reduce: Any) -> bool:
    """Whether objects of a class of Python's or PyTorch's are copied and pickled by others' functions."""
    owner = kind.__module__.partition(".")[0]
    return owner in STANDARD_OR_TORCH and (getattr(reduce, "__module__", None) or "").partition(".")[0] != owner


def _is_not_looked_into(folder: str) -> bool:
    """Whether modules in a folder are not found, or by a finder that is neither Python's nor an installed package's."""
    finder = sys.path_importer_cache[folder]
    if finder is None:
        return os.path.isdir(folder)
    return type(finder).__module__ not in ("_frozen_importlib_external", "zipimport") and not _is_of_a_package(finder)


def _of_logger(logger: logging.Logger) -> tuple[Any, ...]:
    """What a logger leaves out that it would tell by default; it may tell more."""
    return max(logger.level, logging.WARNING), logger.disabled, *logger.filters


def _working_folder() -> str:
    """Its name, or why it has none: it is gone, or thousands of folders deep."""
    try:
        return os.getcwd()
    except OSError as error:
        return str(error)


def _recursion() -> int:
    """The interpreter's limit, one for all of which PyTorch's code sets some."""
    limit = sys.getrecursionlimit()
    return RECURSION if LEAST_RECURSION <= limit <= RECURSION else limit


def _stance() -> str:
    """The stance that torch.compile has (torch.compiler.set_stance), also where it has not been imported yet."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(getattr(module, "_stance", None), "stance", "default")


def _of_decimals(context: decimal.Context) -> tuple[Any, ...]:
    """A decimal context's settings, which its flags are not: results raise them."""
    traps = frozenset(signal for signal, is_on in context.traps.items() if is_on)
    return context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp, traps


@functools.lru_cache(maxsize=1)
def _treatment_of_warnings(filters: tuple[tuple[Any, ...], ...], default: str) -> tuple[str, ...]:
    """What is done with warnings of each kind of GENERAL: filters of a library's own texts, kinds or modules say nothing of
    these, however they are written."""
    return tuple(
        next((action for action, *those, _ in filters if _fits(those, *told)), default)
        for told in itertools.product(GENERAL, TEXTS, WARNING_MODULES)
    )


def _fits(those: list[Any], kind: type[Warning], text: str, module: str) -> bool:
    """Whether a filter, of a message, a kind and a module, is for such a warning, wherever it is raised."""
    message, category, where = those
    return (
        issubclass(kind, category)
        and (message is None or re.match(message, text) is not None)
        and (where is None or re.match(where, module) is not None)
    )


def _environment() -> dict[bytes, bytes]:
    """As native code finds it, which os.putenv() changes behind Python's."""
    if not ENVIRONMENT:  # elsewhere, or emptied by clearenv()
        return {}
    made = {}
    for variable in itertools.takewhile(lambda v: v is not None, map(ENVIRONMENT.__getitem__, itertools.count())):
        name, _, value = variable.partition(b"=")
        if not name.startswith(LIBRARIES_OWN):
            made[name] = value
    return made


def _saving_and_loading() -> tuple[Any, ...]:
    """torch.save()'s and torch.load()'s settings; what is safe to load, but for PyTorch's own, which its modules add."""
    said = torch.serialization
    safe = [kind for kind in said.get_safe_globals() if not getattr(kind, "__module__", "").startswith("torch")]
    return said.get_default_load_endianness(), said.get_crc32_options(), said.get_default_mmap_options(), *safe


def _device() -> tuple[Any, ...]:
    """On a GPU: which is in use, its stream, and how far its random numbers are."""
    if not torch.cuda.is_initialized():
        return ()
    generators = [(each.initial_seed(), each.get_offset()) for each in torch.cuda.default_generators]
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream, *generators


def _umask() -> int:
    """The mask of new files' modes, which can be read only by setting it."""
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _as_text(stream: Any) -> tuple[Any, ...]:
    """A stream, and how it is written to; what a program has put in its place may have no such settings."""
    settings = ("encoding", "errors", "line_buffering", "write_through")
    return stream, *(getattr(stream, name, None) for name in settings), dict(getattr(stream, "__dict__", {}))


def _how_it_writes(stream: Any) -> int:
    """A std::ostream's format, state, buffer and language."""
    told = stream.raw
    return hash(told[: FILLED_WITH.start] + told[FILLED_WITH.stop :])


def _file_behind(descriptor: int) -> tuple[int, ...]:
    try:
        status = os.fstat(descriptor)
    except OSError:  # closed
        return ()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL), fcntl.fcntl(descriptor, fcntl.F_GETFD)
    return status.st_dev, status.st_ino, *flags


def _treatment() -> tuple[Any, ...]:
    """What else Linux does with this process, as it tells by several ways."""
    word, told = ctypes.c_long(), [PRCTL(option, 0, 0, 0, 0) for option in TREATMENT]
    told += [PRCTL(SPECULATION, which, 0, 0, 0) for which in SPECULATIONS]
    for option in TREATMENT_TOLD:
        word.value = 0
        told.append((PRCTL(option, ctypes.byref(word), 0, 0, 0), word.value))
    if ASKING:
        memory, personality, of_files, of_locks = map(ctypes.c_long, ASKING[:-1])
        word.value = 0
        told.append((SYSCALL(memory, ctypes.byref(word), None, *map(ctypes.c_long, (0, 0, 0))), word.value))
        told += [SYSCALL(personality, ctypes.c_long(0xFFFFFFFF)), SYSCALL(of_files, ctypes.c_long(1), ctypes.c_long(0))]
        locks, length = ctypes.c_long(), ctypes.c_long()
        SYSCALL(of_locks, ctypes.c_long(0), ctypes.byref(locks), ctypes.byref(length))
        told += [locks.value, length.value, *_stack_for_signals()]
    if platform.machine() == "x86_64":
        told.append(SYSCALL(ctypes.c_long(CPUID), ctypes.c_long(MAY_ASK), ctypes.c_long(0)))
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    told += [status.get(name, "").strip() for name in OF_STATUS]
    with contextlib.suppress(OSError), open("/proc/self/timers") as file:  # POSIX's
        told.append(file.read())
    return tuple(told)


def _stack_for_signals() -> tuple[int, ...]:
    """Of this thread. LLVM sets one as Triton first compiles and it catches signals: then what was there before."""
    stack = (ctypes.c_long * 3)()
    SYSCALL(ctypes.c_long(ASKING[-1]), None, stack)
    now = tuple(stack)
    if not STACK or (now != STACK[0] and not any(_is_tritons(at) for at, _ in _handlers().values())):
        STACK[:] = [now]
    return STACK[0]


def _on_other_cores() -> frozenset[int]:
    """The threads that were once on other cores: whoever starts one may choose its cores at once, but PyTorch's and
    OpenMP's are the model's."""
    moved = []
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it has ended
            cores = os.sched_getaffinity(thread)
            if CORES.setdefault(thread, cores) != cores:
                moved.append(thread)
    return frozenset(moved)


def _on_other_schedules() -> frozenset[int]:
    """The threads whose policy, niceness, slice or share was once another."""
    moved, said = [], ctypes.create_string_buffer(64)
    for thread in map(int, os.listdir("/proc/self/task")):
        size = ctypes.c_long(len(said))
        is_told = SYSCALL(ctypes.c_long(SCHEDULE), ctypes.c_long(thread), said, size, ctypes.c_long(0)) == 0
        if is_told and SCHEDULES.setdefault(thread, said.raw) != said.raw:
            moved.append(thread)
    return frozenset(moved)


def _running_of_scripts() -> tuple[Any, ...]:
    """How TorchScript fuses operators, and whether it looks at shapes first, which can be read only by setting them."""
    fusion, profiles = torch._C._jit_set_fusion_strategy([]), torch._C._jit_set_profiling_executor(True)
    torch._C._jit_set_fusion_strategy(fusion)
    torch._C._jit_set_profiling_executor(profiles)
    return profiles, *fusion


def _autocast_nesting() -> int:
    """How deep autocast is said to be in itself: only where it ends altogether does it forget what it has cast."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def check_locks_of_openmp() -> None:
    """Raises ProcessChange where one of those that all libraries share is held, in which all others wait for good."""

    def taken_and_left() -> None:
        for take, leave in OPENMPS_LOCKS:
            take()
            leave()

    thread = threading.Thread(target=taken_and_left, daemon=True)
    thread.start()
    thread.join(LOCK_S)
    if thread.is_alive():
        raise ProcessChange("keeps the lock of OpenMP's critical or atomic parts, for which its model waits")


def key_of_threads() -> int:
    """The first of the keys that is free, of some thousand that a process has for what its threads have of their own."""
    key = ctypes.c_uint()
    if not LINUX or NEW_KEY(ctypes.byref(key), None):
        return MOST_KEYS if LINUX else 0
    FREE_KEY(key)
    return key.value


def files_there() -> dict[int, tuple[int, ...]]:
    """What each open file of this process is, and how it is set."""
    return {descriptor: _file_behind(descriptor) for descriptor in map(int, os.listdir("/dev/fd"))}


def check_files(known: dict[int, tuple[int, ...]]) -> None:
    """Raises ProcessChange where one of these is another now, or set otherwise."""
    for descriptor, before in known.items():
        if before and _file_behind(descriptor) != before:
            raise ProcessChange(f"changes an open file of its process, which is its model's: {descriptor}")


def count_open_files() -> int:
    """How many files this process has open, of which a model's may have a thousand."""
    return len(os.listdir("/dev/fd"))


def refuse_watchdogs() -> None:
    """No kernel ends its model's process after some time: that such a thread waits nobody tells."""

    def dump_traceback_later(*words: Any, **options: Any) -> None:
        raise ProcessChange("starts a watchdog, which ends the process, its model's, or writes to its standard error")

    faulthandler.dump_traceback_later = dump_traceback_later


def refuse_untold_settings() -> None:
    """No kernel sets what nobody can ask for: that MKL or oneDNN print what they do for its model, how PyTorch's profiler
    records, …"""

    def refuse(level: int) -> int:
        if level:
            raise ProcessChange("has libraries print what they do for all of its process, which is its model's")
        return 1

    def refuse_to_set(name: str, *values: Any) -> None:
        raise ProcessChange(f"calls {name}, which sets something for all of its process, which is its model's")

    torch._C._verbose.mkl_set_verbose = torch._C._verbose.mkldnn_set_verbose = refuse
    for of, name in UNTOLD:
        if hasattr(of, name):
            setattr(of, name, functools.partial(refuse_to_set, name))


def _signal_handlers() -> dict[str, Any]:
    """By signal, Python's and that of native code; the timers, and how signals are delivered."""
    caught = _signals_caught()
    handlers = {_signal_name(number): (signal.getsignal(number), caught.get(number)) for number in SIGNALS}
    return handlers | {"timers": tuple(map(signal.getitimer, TIMERS)), "delivery": _signals_apart()}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def _signals_apart() -> tuple[Any, ...]:
    """The signals that are blocked, and the file that is written to where one comes."""
    woken = signal.set_wakeup_fd(-1)
    if woken != -1:
        signal.set_wakeup_fd(woken)
    return frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())), woken


class _Action(ctypes.Structure):
    """glibc's struct sigaction of Linux, with room for more."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_uint),
        ("rest", ctypes.c_byte * 128),
    )


@contextlib.contextmanager
def signals_kept(numbers: Sequence[int]) -> Iterator[None]:
    """What handles these signals is the same behind it: Python itself leaves the flags of its own handler."""
    handlers, actions = {number: signal.getsignal(number) for number in numbers}, {}
    for number in numbers if LINUX else ():
        SIGACTION(number, None, ctypes.byref(actions.setdefault(number, _Action())))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: of native code
        for number, action in actions.items():
            SIGACTION(number, ctypes.byref(action), None)


class _Symbol(ctypes.Structure):
    """Dl_info: where an address lies."""

    _fields_ = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p))


def _signals_caught() -> dict[int, tuple[int | None, int]]:
    """Signal -> its handler's address and flags, as Linux has it: native code tells nobody. Of those alone that Python
    names, for others are glibc's, for its threads. LLVM catches some as Triton first compiles, in a model's process as in
    this one: of these, what was there when it was last looked."""
    CAUGHT.update({number: at for number, at in _handlers().items() if not _is_tritons(at[0])})
    return dict(CAUGHT)


def _handlers() -> dict[int, tuple[int | None, int]]:
    action, found = _Action(), {}
    for number in SIGNALS if LINUX else ():
        SIGACTION(number, None, ctypes.byref(action))
        found[number] = action.handler, action.flags & ~RESTORER  # None: the default
    return found


def _is_tritons(address: int | None) -> bool:
    symbol = _Symbol()
    found = (address or 0) > 1 and DLADDR(ctypes.c_void_p(address), ctypes.byref(symbol))
    return bool(found) and b"libtriton" in (symbol.file or b"")


@functools.lru_cache(maxsize=1)
def _abstract_classes(token: object) -> tuple[bool, ...]:
    """Which abstract classes of Python's those of tensors and modules count as; the token is another when some class has
    been registered with some other."""
    kinds = torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.Size, torch.dtype, torch.device
    return tuple(issubclass(kind, each) for each in ABSTRACT for kind in kinds)


def _event_loops() -> tuple[Any, ...]:
    """The class that makes those of asyncio, if it is not Python's own, which is made when first asked for; and the loop
    that this thread is said to have."""
    module = sys.modules.get("asyncio.events")
    policy = getattr(module, "_event_loop_policy", None)
    is_pythons = type(policy).__module__.startswith(("asyncio", "builtins"))
    return None if is_pythons else type(policy), getattr(getattr(policy, "_local", None), "_loop", None)


def _is_of_a_package(finder: Any) -> bool:
    """Whether a finder of modules is an installed package's: some come as they are imported, such as setuptools'."""
    name = getattr(finder, "__module__", None) or type(finder).__module__
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _bytes_of(t: torch.Tensor) -> bytes:
    return ctypes.string_at(t.data_ptr(), t.nbytes)


def _openmp() -> list[Callable[[], int]]:
    """What OpenMP says of itself beside its number of threads."""
    program = ctypes.CDLL(None)
    names = ("omp_get_dynamic", "omp_get_max_active_levels", "omp_get_nested", "omp_get_thread_limit")
    names += ("omp_get_default_device",)
    said = [getattr(program, name) for name in names if hasattr(program, name)]
    if hasattr(program, "omp_get_schedule"):
        said.append(functools.partial(_schedule, program.omp_get_schedule))
    return said


def _fenv() -> Callable[[Any], int] | None:
    """glibc's fegetenv() on x86-64, whose result is as it is here."""
    program = ctypes.CDLL(None)
    is_known = LINUX and platform.machine() == "x86_64" and hasattr(program, "fegetenv")
    return program.fegetenv if is_known else None


def _schedule(ask: Callable[..., None]) -> int:
    """OpenMP's of loops that leave it to the program: its kind and the size of its chunks."""
    kind, chunk = ctypes.c_int(), ctypes.c_int()
    ask(ctypes.byref(kind), ctypes.byref(chunk))
    return kind.value << 32 | chunk.value


def _floating_point_control() -> tuple[int, ...]:
    """Which results raise a signal, and how the processor rounds them: on x86-64, of both of its units. Where registers of
    the older are taken, which MMX's instructions do, what is computed there is NaN."""
    if FENV is None:
        return ()
    environment = ctypes.create_string_buffer(64)
    FENV(environment)
    x87, taken, mxcsr = (int.from_bytes(environment.raw[part], "little") for part in (X87, TAKEN, MXCSR))
    return x87, taken, mxcsr & ~FLAGS


def _exceptions() -> tuple[Any, ...]:
    """Of this thread, as C++ has them: which is handled, and how many are on their way, where destructors do less."""
    if EXCEPTIONS is None:
        return ()
    handled, thrown = _Exceptions.from_address(EXCEPTIONS()).handled, _Exceptions.from_address(EXCEPTIONS()).thrown
    return handled, thrown


def _rounding() -> tuple[float, ...]:
    """What the processor makes of results that lie between two numbers, and, made large again (where denormal numbers
    are zeros, they equal zero), of one that is too small for a normal number."""
    unit, least = sys.float_info.epsilon / 2, sys.float_info.min
    return least / 2 * 2.0**60, 1 + 1.5 * unit, 1 + 0.5 * unit, -1 - 0.5 * unit


def _settings() -> dict[str, Callable[[], Any]]:
    """By name the functions of SETTINGS_OF that say how PyTorch is set: they take no argument and return one of VALUES."""
    saying = {}
    with warnings.catch_warnings(record=True) as deprecated:
        warnings.simplefilter("always")
        for of, name in [(each, name) for each in SETTINGS_OF for name in filter(SETTING_NAMES.fullmatch, dir(each))]:
            deprecated.clear()
            try:
                said = getattr(of, name)()
            except (TypeError, RuntimeError):  # it takes arguments, or is not for this machine
                continue
            if isinstance(said, VALUES) and not deprecated:
                saying[name] = getattr(of, name)
    return saying


def _recorded() -> Callable[[], bool] | None:
    """at::isRecordFunctionEnabled(), without which no profiler sees what this thread calls: Python can only set it."""
    is_recorded = getattr(ctypes.CDLL(torch._C.__file__), "_ZN2at23isRecordFunctionEnabledEv", None)
    if is_recorded is not None:
        is_recorded.restype = ctypes.c_bool
    return is_recorded


class _Exceptions(ctypes.Structure):
    """__cxa_eh_globals of C++'s ABI."""

    _fields_ = (("handled", ctypes.c_void_p), ("thrown", ctypes.c_uint))


def _of_cpp() -> tuple[list[Any], Any]:
    """libstdc++'s streams, where PyTorch has loaded it: how they write, and whether at all. What tells of exceptions."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        streams = [(ctypes.c_char * STREAM_BYTES).in_dll(library, name) for name in STREAMS_OF_CPP]
        library.__cxa_get_globals.restype = ctypes.c_void_p
        return streams, library.__cxa_get_globals
    except (OSError, ValueError, AttributeError):
        return [], None


RECORDED = _recorded()
SETTINGS, OPENMP, FENV = _settings(), _openmp(), _fenv()
LIBC = ctypes.CDLL(None)
PRCTL, SIGACTION, DLADDR, SYSCALL = (LIBC.prctl, LIBC.sigaction, LIBC.dladdr, LIBC.syscall) if LINUX else (None,) * 4
NEW_KEY, FREE_KEY = (LIBC.pthread_key_create, LIBC.pthread_key_delete) if LINUX else (None, None)
C_STREAMS = [ctypes.c_void_p.in_dll(LIBC, name) for name in STREAMS] if LINUX else []
CPP_STREAMS, EXCEPTIONS = _of_cpp() if LINUX else ([], None)
OPENMPS_LOCKS = [
    tuple(getattr(LIBC, f"GOMP_{kind}_{what}") for what in ("start", "end"))
    for kind in ("critical", "atomic")
    if hasattr(LIBC, f"GOMP_{kind}_start")
]
CAUGHT = _handlers()
CORES: dict[int, set[int]] = {}  # of each thread, as it was first seen
SCHEDULES: dict[int, bytes] = {}
STACK: list[tuple[int, ...]] = []  # for signals, as it was last seen
ENVIRONMENT = ctypes.POINTER(ctypes.c_char_p).in_dll(LIBC, "environ") if LINUX else None
ABSTRACT = [kind for of in (collections.abc, numbers) for kind in vars(of).values() if isinstance(kind, abc.ABCMeta)]
START = multiprocessing.get_all_start_methods()[0]  # of processes, where nobody has said another way
