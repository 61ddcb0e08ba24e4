"""From the command to the first logged step, and to the end: the smoke recipes in fresh processes.

    python benchmarks/start.py [--runs 3] [--job sft distill] [--force]

Makes tiny models and rows of its own, those of `trl-opd demo` but untrained, in a temporary folder. The figures are
medians, on one thread, offline. `imports` is a process that imports what a run imports and ends. The first run of each
kind is not counted: it reads the libraries from the disk. Looks first whether other work is going on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

from trl_opd.demo.models import write_model
from trl_opd.demo.task import split_problems

JOBS = ("sft", "distill")
CLI = "import sys; from trl_opd.cli.main import main; sys.exit(main())"
IMPORTS = """from trl_opd import importing
with importing.for_good():
    import trl_opd.run"""


def make_inputs(folder: Path) -> None:
    """`student`, `teacher` and `rows.jsonl`: 300 sums written out, as in the demo."""
    for name, seed in (("student", 1), ("teacher", 2)):
        write_model(folder / name, hidden=64, seed=seed)
    rows = [{"prompt": p.prompt, "completion": p.completion} for p in split_problems(0, 300)[0]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def command(job: str, folder: Path) -> list[str]:
    recipe = [sys.executable, "-c", CLI, job, "--config", f"tiny/{job}/config_smoke.yaml", "--disable_tqdm", "true"]
    own = {"model_name_or_path": "student", "dataset_name": "rows.jsonl", "output_dir": f"out-{job}-{time.time_ns()}"}
    if job == "distill":
        own["teacher_model_name_or_path"] = "teacher"
    return [*recipe, *(part for name, value in own.items() for part in (f"--{name}", str(folder / value)))]


def one_run(arguments: list[str], folder: Path) -> tuple[float, float]:
    """Seconds to the first line of a step (0 where none comes) and to the end of a process."""
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    first, said = 0.0, []
    begin = time.perf_counter()
    with subprocess.Popen(
        arguments, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout or ():
            said.append(line)
            if not first and line.split()[:2] == ["step", "1"]:
                first = time.perf_counter() - begin
    if process.returncode:
        sys.exit("".join(said))
    return first, time.perf_counter() - begin


def measure(jobs: list[str], runs: int) -> list[list[str]]:
    """Rows of the table. All kinds of process take turns; the first turn is not counted."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        turns = []
        for _ in range(runs + 1):
            imports = one_run([sys.executable, "-c", IMPORTS], folder)[1]
            turns.append((imports, *(one_run(command(job, folder), folder) for job in jobs)))
    imports = common.spread([turn[0] for turn in turns[1:]], 1)
    rows = []
    for i, job in enumerate(jobs, 1):
        first, end = zip(*(turn[i] for turn in turns[1:]), strict=True)
        if not statistics.median(first):
            sys.exit(f"{job}: no line of a first step was printed")
        rows.append([job, common.spread(first, 1), common.spread(end, 1), imports])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--force", action="store_true", help="measure although the machine is busy")
    args = parser.parse_args()
    busy = common.refuse_a_busy_machine(args.force)
    print(common.table(["job", "first step, s", "end, s", "imports, s"], measure(args.job, args.runs)))
    print(common.environment("cpu", busy))


if __name__ == "__main__":
    main()
