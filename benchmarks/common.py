"""What the benchmarks share: is the machine quiet, how long, how much memory, and where the table goes."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
import trl

QUIET = 0.15  # the most processors that other work may keep busy while times still mean something


def busy_processors(watch: float = 2.0) -> float:
    """How many processors are at work, by what Linux counts in `watch` seconds; elsewhere the load average."""
    try:
        first = _ticks()
    except OSError:
        return os.getloadavg()[0]
    time.sleep(watch)
    (idle, total), (idle_before, total_before) = _ticks(), first
    return (1 - (idle - idle_before) / max(total - total_before, 1)) * (os.cpu_count() or 1)


def _ticks() -> tuple[int, int]:
    """Ticks that all processors were idle, and all ticks, since the start."""
    with open("/proc/stat") as file:
        ticks = [int(part) for part in file.readline().split()[1:9]]  # the later ones are counted in the first
    return ticks[3] + ticks[4], sum(ticks)


def refuse_a_busy_machine(force: bool) -> float:
    """How many processors are busy; exits where other work is going on, unless `force`."""
    busy = busy_processors()
    if busy > QUIET and not force:
        sys.exit(
            f"Other work keeps {busy:.2f} processors busy, and times would say nothing. Wait until it is under {QUIET}"
            ", or pass --force."
        )
    return busy


def environment(device: str, busy: float) -> str:
    """One line: versions, device, threads, other work."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, TRL {trl.__version__}, transformers {transformers.__version__}"
    return f"{time.strftime('%Y-%m-%d')}, {device}, {name}, {versions}; processors busy with other work: {busy:.2f}."


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str) -> float:
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin


def start_peak(device: str) -> int:
    """Let the peak start anew; returns what is taken now, in bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def peak(device: str) -> int:
    """The peak since `start_peak`, in bytes: of the process, or of the GPU's allocator."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


def status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and the lowest and highest: `2.41 (2.38–2.52)`."""
    middle, low, high = (f"{x:.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low}–{high})"


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Ratio of each pair."""
    return [a / b for a, b in zip(over, under, strict=True)]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_table(path: Path, name: str, text: str) -> None:
    """Put `text` between `<!-- NAME -->` and `<!-- end -->` of a page. Raises `ValueError` where they are missing."""
    page = path.read_text(encoding="utf-8")
    begin, _, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not end:
        raise ValueError(f"{path} has no lines `<!-- {name} -->` and `<!-- end -->` to put the table between.")
    path.write_text(f"{begin}<!-- {name} -->\n\n{text}\n\n{end}{after}", encoding="utf-8")
