"""Imports go down only, and a private name of TRL or transformers is touched in one file only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trl_opd"

# the layer of a module is that of its longest prefix here
LAYERS = {
    "types": 0,
    "errors": 0,
    "importing": 0,
    "shown": 0,
    "secrets": 0,
    "losses": 1,
    "masking": 1,
    "metrics": 1,
    "balance": 1,
    "data": 2,
    "few_tokens": 2,
    "generation": 2,
    "rollout": 2,
    "teachers": 2,
    "heads": 2,
    "flat": 2,
    "row_attention": 2,
    "lora_linear": 2,
    "_trl": 3,
    "checks": 3,
    "configs": 3,
    "config_checks": 3,
    "run_fields": 3,
    "benchmark_hook": 3,
    "hub": 3,
    "new_tokens": 3,
    "old_keys": 3,
    "old_values": 3,
    "key_rules": 3,
    "grpo_keys": 3,
    "recipes": 3,
    "blame": 3,
    "recipe_file": 3,
    "recipe_values": 3,
    "shipped": 3,
    "launch": 3,
    "layouts": 3,
    "checkpoints": 3,
    "fingerprint": 3,
    "resume": 3,
    "run_lock": 3,
    "stops": 3,
    "checkpointed_trainer": 3,
    "step_file": 3,
    "nonfinite": 3,
    "throughput": 1,
    "compiled": 3,
    "token_trainer": 3,
    "config_fields": 3,
    "sft_setup": 3,
    "sft_trainer": 3,
    "prompt_data": 3,
    "rollout_trainer": 3,
    "distillation_trainer": 3,
    "progress": 3,
    "process_log": 3,
    "accuracy": 3,
    "teacher_setup": 3,
    "student_setup": 3,
    "summary": 3,
    "run": 3,
    "run_sft": 3,
    "run_distill": 3,
    "cli": 4,
    "demo": 4,
}
ALLOWED = {
    0: {"torch"},
    1: {"torch"},
    2: {"torch", "transformers", "datasets", "peft", "jinja2"},
}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def imports(path: Path):
    """(top-level package, module inside trl_opd or None, imported names) of every import in a file."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (
                (a.name.split(".")[0], a.name.split(".")[1] if a.name.startswith("trl_opd.") else None, [])
                for a in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if node.level:
                base = [*here[: len(here) - node.level], *(node.module or "").split(".")]
                inside = [part for part in base if part]
                yield from (("trl_opd", inside[0], names),) if inside else (("trl_opd", name, []) for name in names)
            else:
                parts = (node.module or "").split(".")
                yield parts[0], parts[1] if parts[0] == "trl_opd" and len(parts) > 1 else None, names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    layer = LAYERS[path.relative_to(PACKAGE).with_suffix("").parts[0]]
    for top, inside, _ in imports(path):
        if inside is not None:
            assert LAYERS[inside] <= layer, f"{path.name} (L{layer}) imports trl_opd.{inside} (L{LAYERS[inside]})"
        elif top != "trl_opd" and layer in ALLOWED:
            assert top in ALLOWED[layer] | set(sys.stdlib_module_names), f"{path.name} (L{layer}) imports {top}"


def test_private_names_are_imported_in_one_file_only():
    for path in FILES:
        for top, _, names in imports(path):
            if top in ("trl", "transformers", "accelerate", "peft") and path.name != "_trl.py":
                private = [name for name in names if name.startswith("_")]
                assert not private, f"{path.name} imports {private} from {top}"


def test_files_stay_small():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, path


def test_importing_the_package_imports_neither_torch_nor_trl():
    code = "import sys, trl_opd; assert not {'torch', 'trl', 'transformers'} & set(sys.modules); trl_opd.SFTConfig"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_line_imports_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules); from trl_opd.cli.main import main; main(['--help']);"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - {'trl_opd'};"
        "assert new <= set(sys.stdlib_module_names), new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
