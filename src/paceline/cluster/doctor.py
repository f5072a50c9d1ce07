"""Checks of this machine for training; each finding is a line with advice for problems.

`root` is the root of the file system that contains /proc and /sys.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import platform
import resource
import shutil
import socket
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.cluster.cgroup import cpu_quota
from paceline.cluster.host import Host
from paceline.cluster.probe import Energy, cache_bytes, cpu_energy, gpu_energy
from paceline.device import CPU, DEVICE_VARIABLE, VISIBLE
from paceline.files import kernel_text
from paceline.torch_versions import OLDEST, newer_than_tested, release
from paceline.units import size

_ROOT = Path("/")
_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "bf16",
    "amx_bf16": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "bf16",
}
_OWN_CLOCK = ("intel_pstate", "amd-pstate-epp")  # drivers whose `powersave` mode reaches full speed under load
_NVIDIA = "0x10de"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Finding:
    """A finding about one topic, which is shown as a line.

    A `problem` prevents training. A `note` reduces the speed or prevents the use of an optional feature.
    """

    level: Literal["ok", "note", "problem"]
    topic: str
    text: str
    advice: str | None = None


def check_machine(host: Host, driver: str | None, root: Path = _ROOT) -> Iterator[Finding]:
    """Check the processor, memory, GPUs and network."""
    yield _processor(host, root)
    yield _cores(host, root)
    yield _clock(root)
    yield _memory(host)
    yield from _gpus(host, driver, root)
    yield _network(host)
    yield _energy("CPU energy", cpu_energy(root))
    if host.gpus:
        yield _energy("GPU energy", _gpu_counter() if driver else Energy([], "no counter that is known for these"))


def check_system(root: Path = _ROOT) -> Iterator[Finding]:
    """Check the kernel: shared memory, loopback interface and limits on files."""
    yield _segment()
    yield _dev_shm(root)
    yield _loopback()
    yield from _limits(root)
    yield _temporary_folder()


def check_data_plane(variables: Mapping[str, str], root: Path = _ROOT) -> Finding:
    """Check the encryption of traffic between ranks for the given environment variables."""
    plain = "gloo and NCCL send tensors in plaintext and ask nobody who they are (tcp encrypts)"
    page = "docs/how-to/secure_the_network.md"
    advice = f"keep it on a network of the run's own: {page} has WireGuard and a NetworkPolicy, complete"
    named = [name.lstrip("=") for key in _INTERFACES for name in variables.get(key, "").split(",")]
    interfaces = list(dict.fromkeys(name for name in named if name and name != "lo"))
    devices = root / "sys/class/net"
    inside = [name for name in interfaces if "DEVTYPE=wireguard" in kernel_text(devices / name / "uevent")]
    if interfaces:
        over = f"between hosts over {', '.join(interfaces)}"
        if inside == interfaces:
            return Finding("ok", "data plane", f"{over}, which is WireGuard: encrypted")
        return Finding("note", "data plane", f"{over}: {plain}", advice)
    address = variables.get("MASTER_ADDR", "127.0.0.1")
    if address != "localhost" and not address.startswith("127.") and address != "::1":
        return Finding("note", "data plane", f"between hosts, at {address}: {plain}", advice)
    text = f"on one host ranks meet on loopback; between hosts {plain}: see {page}"
    return Finding("ok", "data plane", text)


def check_load(cores: int, seconds: float = 0.5) -> Finding:
    """Measure the load of other processes on this machine for some seconds."""
    busy, steal, others = other_load(seconds)
    if steal > 0.05 * cores:
        advice = "measure again when the physical host is quiet, or on dedicated cores"
        text = f"the physical host takes {steal:.1f} of the {cores} cores away (steal time)"
        return Finding("note", "load", text, advice)
    text = f"{busy:.1f} of {cores} cores are busy with other work"
    if busy > 0.1 * cores:
        names = ", ".join(f"{name} {used:.1f}" for name, used in others[:3])
        advice = "end or wait for it before you measure; runs beside it are slower"
        return Finding("note", "load", f"{text}: {names or 'by processes that cannot be seen from here'}", advice)
    return Finding("ok", "load", text)


def other_load(seconds: float) -> tuple[float, float, Sequence[tuple[str, float]]]:
    """Measure the cores that other processes and the hypervisor use, and list the processes.

    The result is the number of busy cores, the number of cores that the hypervisor uses, and a list of processes with
    the cores that each uses. The busiest process is first.
    """
    import psutil

    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    machine, before = psutil.cpu_times(), {pid: used_s for pid, (_, used_s) in _processes().items()}
    started = time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - started
    now, after = psutil.cpu_times(), _processes()
    cores = {pid: (used_s - before.get(pid, 0.0)) / passed_s for pid, (_, used_s) in after.items()}
    busy_s = sum(now[:3]) - sum(machine[:3])  # time in user mode, in user mode with low priority, and in the kernel
    own_cores = sum(used for pid, used in cores.items() if pid in own)
    others = [(f"{after[pid][0]} (pid {pid})", used) for pid, used in cores.items() if pid not in own and used >= 0.05]
    others.sort(key=lambda other: -other[1])
    return max(0.0, busy_s / passed_s - own_cores), (now.steal - machine.steal) / passed_s, others


# The machine


def _processor(host: Host, root: Path) -> Finding:
    flags = _cpu_flags(root)
    features = list(dict.fromkeys(name for flag, name in _FEATURES.items() if flag in flags))
    caches = ", ".join(f"L{level} {size(held)}" for level, held in cache_bytes(root).items())
    text = f"{host.cpu}: {', '.join(features) or 'features unknown'}" + (f"; caches {caches}" if caches else "")
    if flags and not {"avx2", "asimd"} & flags:
        return Finding("note", "processor", f"{text}. Without AVX2, torch takes its slowest code")
    return Finding("ok", "processor", text)


def _cores(host: Host, root: Path) -> Finding:
    there, usable, quota = os.cpu_count() or host.cores, sum(map(len, host.affinity)), cpu_quota(root)
    text = f"{host.cores} logical, {host.physical_cores} physical"
    text += f"; affinity leaves {usable} of {there}" if usable < there else ""
    if quota is not None and quota < usable:
        advice = (
            "more ranks or threads than that are throttled together; raise the limit (docker --cpus, Kubernetes "
            "limits.cpu) to use more"
        )
        return Finding("note", "cores", f"{text}; the control group allows the time of {quota:g}", advice)
    return Finding("ok", "cores", text)


def _clock(root: Path) -> Finding:
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    governor, driver = kernel_text(folder / "scaling_governor"), kernel_text(folder / "scaling_driver")
    if not governor:
        return Finding("ok", "clock", "the frequency governor is not visible, as in most virtual machines")
    if governor == "powersave" and driver not in _OWN_CLOCK:
        text = f"governor powersave ({driver}) keeps the clock low"
        return Finding("note", "clock", text, "cpupower frequency-set -g performance")
    return Finding("ok", "clock", f"governor {governor} ({driver})")


def _memory(host: Host) -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    limit = f", of {size(memory.total)} in the machine (control group)" if host.memory_bytes < memory.total else ""
    text = f"{size(host.memory_bytes)}{limit}; {size(memory.available)} available now"
    if memory.available < 0.1 * memory.total:
        advice = "end what uses it, or train with a smaller batch: the kernel kills a process when it runs out"
        return Finding("note", "memory", text, advice)
    return Finding("ok", "memory", text)


def _gpus(host: Host, driver: str | None, root: Path) -> Iterator[Finding]:
    for gpu in host.gpus:
        name = f"{gpu.kind}:{gpu.index}"
        links = [link for link in host.links if link.name.startswith(f"{name}-") or link.name.endswith(f"-{name}")]
        ways = ", ".join(f"{link.kind} {_gbps(link.bandwidth_gbps)} ({link.name})" for link in links)
        about = f"{gpu.name}, {size(gpu.memory_bytes)}" + (f", driver {driver}" if driver else "")
        yield Finding("ok", name, f"{about}; {ways or 'links unknown'}")
    if host.gpus:
        return
    devices = [d for d in root.glob("sys/bus/pci/devices/*") if kernel_text(d / "vendor") == _NVIDIA]
    on_bus = [d for d in devices if kernel_text(d / "class").startswith("0x03")]
    if on_bus and not any(name in os.environ for name in (DEVICE_VARIABLE, *VISIBLE)):
        advice = "install the NVIDIA driver (in a container: start it with --gpus all)"
        yield Finding("note", "GPU", f"{len(on_bus)} of NVIDIA on the bus, but none that the driver shows", advice)
    elif (root / "dev/kfd").exists():
        advice = "install torch for ROCm: https://pytorch.org/get-started/locally"
        text = "AMD's driver is there, but no GPU that this torch knows; ranks run on the cores"
        yield Finding("note", "GPU", text, advice)
    else:
        yield Finding("ok", "GPU", "none; ranks run on the cores")


def _network(host: Host) -> Finding:
    links = [link for link in host.links if link.kind in ("ethernet", "loopback")]
    up = ", ".join(f"{link.name} {_gbps(link.bandwidth_gbps)}".strip() for link in links)
    return Finding("ok", "network", up or "no interface is up")


def _energy(topic: str, energy: Energy) -> Finding:
    if energy.why_not is None:
        return Finding("ok", topic, "counted by the hardware; runs note it")
    by_root = "root only" in energy.why_not
    advice = (
        "run as root, or let others read: chmod a+r /sys/class/powercap/*/energy_uj (fine-grained energy can "
        "leak secrets)"
    )
    return Finding("note", topic, f"not available: {energy.why_not}", advice if by_root else None)


def _gpu_counter() -> Energy:
    import pynvml

    try:
        pynvml.nvmlInit()
        return gpu_energy(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError as error:
        return Energy([], f"NVML says {error}")


# The kernel


def _segment() -> Finding:
    """Check anonymous shared memory (memfd), which ranks use."""
    try:
        fd = os.memfd_create("paceline-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as memory:
                memory[:5] = b"hello"
        finally:
            os.close(fd)
    except OSError as error:
        advice = "the ranks of this host talk over gloo (TCP) instead, which is several times slower"
        return Finding("note", "shared memory", f"no segment can be made: {error.strerror}", advice)
    return Finding("ok", "shared memory", "a segment can be made")


def _dev_shm(root: Path) -> Finding:
    try:
        size_bytes = shutil.disk_usage(root / "dev/shm").total
    except OSError:
        text = "missing: a data loader with num_workers > 0 cannot pass batches"
        return Finding("note", "/dev/shm", text, "mount a tmpfs there")
    if size_bytes < 2**30:
        text = f"{size(size_bytes)}: little for the batches of a data loader with num_workers > 0"
        return Finding("note", "/dev/shm", text, "docker run --shm-size=2g, or --ipc=host")
    text = f"{size(size_bytes)}, for data loaders with num_workers > 0; the ranks need none of it"
    return Finding("ok", "/dev/shm", text)


def _loopback() -> Finding:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            server.settimeout(5)
            server.accept()[0].close()
    except OSError as error:
        advice = "bring it up: ip link set lo up. The ranks of a run meet there"
        return Finding("problem", "loopback", f"127.0.0.1 cannot be reached: {error}", advice)
    return Finding("ok", "loopback", "127.0.0.1 can be reached")


def _limits(root: Path) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < 1024:
        text = f"at most {files} a process: few for data loader workers"
        yield Finding("note", "open files", text, "ulimit -n 65536")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if any(root.glob("sys/class/infiniband/*")) and locked != resource.RLIM_INFINITY:
        advice = "ulimit -l unlimited (docker run --ulimit memlock=-1), for NCCL over InfiniBand"
        text = f"at most {size(locked)}, and there is InfiniBand, which needs more"
        yield Finding("note", "locked memory", text, advice)


def _temporary_folder() -> Finding:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"hello")
        free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    except OSError as error:
        advice = "set TMPDIR to a folder that can be written"
        return Finding("problem", "temporary files", f"cannot be written: {error}", advice)
    return Finding("ok", "temporary files", f"{tempfile.gettempdir()}, {size(free_bytes)} free")


def _processes() -> dict[int, tuple[str, float]]:
    """Return the name and the CPU seconds of every visible process."""
    import psutil

    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = (process.name(), times.user + times.system)
    return found


def _cpu_flags(root: Path) -> set[str]:
    for line in kernel_text(root / "proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def _gbps(bandwidth: float | None) -> str:
    return f"{bandwidth:g} Gbit/s" if bandwidth else ""


_EXTRAS = {
    "data": (("sklearn", "PIL", "pyarrow"), "digits, image folders, Parquet"),
    "hf": (("transformers",), "Hugging Face models"),
    "metrics": (("torchmetrics",), "metrics of torchmetrics"),
    "tensorboard": (("tensorboard",), "TensorBoard events of every run"),
}
# capabilities of an accelerator, each with the effect of its absence
_CAPABILITIES = {
    "collectives": ("collectives", "one rank only, as ranks cannot send each other what is on the devices"),
    "bf16": ("bf16", "precision: fp32 or fp16 in the job"),
    "fp8": ("fp8", "precision=fp8 is refused"),
    "streams": ("streams", "copies for checkpoints wait their turn in the queue of the computation"),
    "timed_events": ("timed events", "parts of a step are timed by the host, which runs ahead of the device"),
    "pinned_memory": ("pinned memory", "the host waits while a batch is copied to the device"),
    "memory_counted": ("memory counted", "runs and benchmarks are without the devices' memory"),
    "fused_optimizers": ("fused steps", "fused=on takes the ordinary ones"),
    "graphs": ("graphs", "compile=reduce-overhead is refused"),
    "float64": ("float64", "precision=fp64 is refused, and `check` compares in it only on the CPU"),
    "flash_attention": ("flash attention", "cp computes attention by matrices, which takes more memory"),
    "batch_norm_kernels": ("SyncBatchNorm", "batch_norm: sync is computed by plain operations"),
}
_REPORT = ("jinja2",)
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def check_software(host: Host, torch: Mapping[str, Any] | str) -> Iterator[Finding]:
    """Check torch, the compiler and the optional packages.

    `torch` is the result of `Probe.torch`, or the error that it raised.
    """
    yield Finding("ok", "Python", f"{platform.python_version()} ({platform.platform(terse=True)})")
    if isinstance(torch, str):
        yield Finding("problem", "torch", torch, "install it again: https://pytorch.org/get-started/locally")
    else:
        yield from _torch(torch)
        yield from _torch_and_gpus(torch, host)
    yield _compiler()
    yield from _packages()


def check_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find environment variables that would disturb a run."""
    found = [Finding("note", "variables", text, advice) for text, advice in _misleading(environ)]
    yield from found or [Finding("ok", "variables", "none that misleads a run")]


def _torch(torch: Mapping[str, Any]) -> Iterator[Finding]:
    text = f"{torch['version']}, {torch['built_for']}, code for {torch['capability']}"
    if release(torch["version"]) < OLDEST:
        text += f": paceline needs {'.'.join(map(str, OLDEST))} or newer"
        yield Finding("problem", "torch", text, "pip install -U torch")
    elif not torch["gloo"]:
        text += ": built without gloo, over which ranks talk"
        yield Finding("problem", "torch", text, "install a build of torch that has it")
    elif newer := newer_than_tested(torch["version"]):
        text, _, advice = newer.partition(". If something fails: ")
        yield Finding("note", "torch", text, advice)
    else:
        yield Finding("ok", "torch", text)


def _torch_and_gpus(torch: Mapping[str, Any], host: Host) -> Iterator[Finding]:
    there, usable = len(host.gpus), torch["devices"]
    if usable >= there:
        return
    text = f"torch can use {usable} of {there} GPUs"
    without = f"or set {DEVICE_VARIABLE}={CPU} to train on the CPU"
    if torch["built_for"] == "CPU only":
        advice = f"install a build for them: https://pytorch.org/get-started/locally; {without}"
        yield Finding("problem", "torch for GPUs", f"{text}: it is built for the CPU only", advice)
    else:
        advice = (
            f"see what `python -c 'import torch; torch.empty(1, device=\"{host.kind}\")'` says (is the driver too old "
            f"for {torch['built_for']}?); {without}"
        )
        yield Finding("problem", "torch for GPUs", text, advice)


def check_capabilities(can: Mapping[str, Any]) -> Iterator[Finding]:
    """Check torch's capabilities on this machine's accelerators.

    `can` is the entry of that name in the result of `Probe.torch`.
    """
    for name, (topic, without) in _CAPABILITIES.items():
        if can.get(name):
            yield Finding("ok", topic, str(can[name]) if isinstance(can[name], str) else "yes")
        else:
            yield Finding("note", topic, f"no: {without}")


def _compiler() -> Finding:
    """Check for a C++ compiler (CXX or g++) and Python.h, which torch.compile needs."""
    compiler = os.environ.get("CXX") or "g++"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    needed = {f"{compiler} (C++ compiler)": shutil.which(compiler), str(headers): headers.exists()}
    missing = [name for name, there in needed.items() if not there]
    if missing:
        advice = "apt install g++ python3-dev (Debian, Ubuntu), or leave compile out of the plan"
        return Finding("note", "torch.compile", f"missing: {' and '.join(missing)}", advice)
    return Finding("ok", "torch.compile", f"{compiler} and Python's headers are there")


def _packages() -> Iterator[Finding]:
    absent = {extra: [p for p in packages if not _installed(p)] for extra, (packages, _) in _EXTRAS.items()}
    for extra, packages in absent.items():
        if packages:
            text = f"without {', '.join(packages)}: no {_EXTRAS[extra][1]}"
            yield Finding("note", f"extra {extra}", text, f"pip install 'paceline[{extra}]'")
    there = [extra for extra, packages in absent.items() if not packages]
    if there:
        yield Finding("ok", "extras", f"{', '.join(there)} {'are' if len(there) > 1 else 'is'} installed")
    if missing := [p for p in _REPORT if not _installed(p)]:
        text = f"without {', '.join(missing)}: no report.html"
        yield Finding("note", "reports", text, f"pip install {' '.join(missing)}")


def _misleading(environ: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Yield the effects of disturbing variables, each with advice."""
    if "RANK" in environ:
        text = f"RANK={environ['RANK']}: `paceline train` takes itself for a rank of a torchrun"
        yield text, "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT, unless torchrun set them"
    for name in filter(environ.get, _THREADS):
        text = f"{name}={environ[name]}: paceline sets its own for the ranks it starts; loops of your own take this one"
        yield text, f"unset {name}, or choose threads in the plan"
    for name in filter(environ.get, _BINDING):
        text = f"{name}={environ[name]} can bind all ranks to the same cores"
        yield text, f"unset {name}; the plan has pin=on"
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield "CUDA_LAUNCH_BLOCKING: every kernel is waited for, which is slow", "unset CUDA_LAUNCH_BLOCKING"
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        text = "TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective, which is slow"
        yield text, "unset TORCH_DISTRIBUTED_DEBUG"
    for name in filter(environ.__contains__, VISIBLE):
        yield f"{name}={environ[name]}: only these GPUs are used", None
    if environ.get(DEVICE_VARIABLE) == CPU:
        yield f"{DEVICE_VARIABLE}={CPU}: ranks run on the cores", f"unset {DEVICE_VARIABLE} to use GPUs"


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
