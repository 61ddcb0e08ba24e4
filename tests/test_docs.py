"""Recipes and commands in README, docs and examples are understood by the parser."""

import re
import shlex
from pathlib import Path

import pytest

from trl_opd import recipes, shipped
from trl_opd.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
PAGES.append(ROOT / "trl_opd" / "recipes" / "README.md")
RECIPES = sorted((ROOT / "examples").rglob("*.yaml"))


def commands():
    for page in PAGES:
        for line in re.findall(r"^(?:\s*)(trl-opd [^\n`#]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            yield pytest.param(line.strip(), id=f"{page.name}: {line.strip()[:50]}")


@pytest.mark.parametrize("command", commands())
def test_commands_name_what_exists(command):
    _, name, *rest = shlex.split(command)
    assert name in COMMANDS
    recipe = rest[rest.index("--config") + 1] if "--config" in rest else None
    if recipe and "/" in recipe:
        assert (ROOT / recipe).exists() or recipe in shipped.recipe_names(), recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_example_recipes_are_understood(path):
    job = "distill" if "teacher_" in path.read_text() else "sft"
    settings = recipes.parse(job, ["--config", str(path)])
    assert settings.model.model_name_or_path and settings.script.dataset_name


def test_the_recipe_in_the_readme(tmp_path):
    (recipe,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "r.yaml").write_text(recipe)
    settings = recipes.parse("distill", ["--config", str(tmp_path / "r.yaml")])
    assert settings.model.lora_target_modules == "all-linear" and settings.training.max_completion_length == 512


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
