"""A pytest plugin that runs TRL's own tests, offline and without a GPU, with the trainers of this package.

    PYTHONPATH=tests python -m pytest -p upstream.plugin PATH/TO/trl/tests/test_sft_trainer.py

What the tests import from `trl` are then this package's trainers and configs (`--classes trl` leaves TRL's own: the
baseline), and what they load from the Hub are stand-ins of the same names.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from .classes import CHOICES
from .differs import expected
from .home import HOME

_HUB, _HUB_WITH_REAL_IDS = HOME / "hub", HOME / "hub-with-real-ids"
_ID_OF_QWEN = re.compile(r"\b15\d{4}\b")  # in a test: an id after the words of Qwen's vocabulary
_ID_OF_QWEN_3_5 = re.compile(r"\b248\d{3}\b")
_NAME = re.compile(r"[\"'](trl-internal-testing/[\w.-]+)[\"']")
# messages that tests of TRL's main branch expect, and not every version gives
NOT_SAID = {
    "test_padding_free_warns_only_for_unsupported_attention[eager-True]": "supported Flash Attention variant",
    "test_train_with_compute_loss_func": "`compute_loss_func` receives the model's own outputs",
}
_served: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("upstream").addoption(
        "--classes",
        choices=CHOICES,
        default="ours",
        help="what `from trl import ...` gives the tests: our trainers and configs, our trainers with TRL's configs, "
        "or TRL's own",
    )
    parser.getgroup("upstream").addoption(
        "--other-teacher",
        action="store_true",
        help="give our DistillationTrainer, which refuses the student's own checkpoint as teacher, a copy of it",
    )


def pytest_configure(config: pytest.Config) -> None:
    import datasets
    import torch
    from transformers.utils import is_torchvision_available

    from .classes import COPY, exchange
    from .rows import DATASETS, write_dataset
    from .standins import MODELS, WITH_REAL_IDS, full_name, write_model
    from .vision import VISION

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    for name, standin in {**MODELS, **(VISION if is_torchvision_available() else {})}.items():
        repository = write_model(name, standin, _HUB)
        repository.with_name(repository.name + COPY).symlink_to(repository, target_is_directory=True)
        _served.add(full_name(name))
    for name, standin in WITH_REAL_IDS.items():
        write_model(name, standin, _HUB_WITH_REAL_IDS)
    folders = {full_name(name): write_dataset(name, HOME / "rows" / name) for name in DATASETS}
    _served.update(folders)
    load = datasets.load_dataset

    def load_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        return load(str(folders.get(path, path)), *args, **kwargs)

    datasets.load_dataset = load_dataset
    _without_bf16_on_a_cpu()
    exchange(config.getoption("--classes"), config.getoption("--other-teacher"))


def _without_bf16_on_a_cpu() -> None:
    """TRL's configs default to bf16, which `TrainingArguments` refuses where there is no GPU; ours know."""
    import torch
    from trl.trainer.base_config import _BaseConfig

    if torch.cuda.is_available():
        return
    check = _BaseConfig.__post_init__

    def without_bf16(self: Any) -> None:
        if self.bf16 is None:
            self.bf16 = False
        check(self)

    _BaseConfig.__post_init__ = without_bf16


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot be seen here, with the reason, and mark what is known to differ."""
    classes, other_teacher = config.getoption("--classes"), config.getoption("--other-teacher")
    for item in items:
        why = _not_applicable(item)
        mark = pytest.mark.skip(reason=why) if why else expected(item.path.stem, item.name, classes, other_teacher)
        if mark is not None:
            item.add_marker(mark)


def _not_applicable(item: Any) -> str:
    """Why a test can be neither passed nor failed, or nothing."""
    missing = sorted(_names(item) - _served)
    if missing:
        return f"no stand-in for {', '.join(missing)}"
    if _ID_OF_QWEN_3_5.search(inspect.getsource(item.function)):
        return "no stand-in with the ids of Qwen3.5"
    said = NOT_SAID.get(item.name)
    return f"TRL {version('trl')} does not say: {said}" if said and not _is_said(said) else ""


@lru_cache
def _is_said(words: str) -> bool:
    """Whether TRL's SFT trainer holds a message with these words: tests of another version of TRL expect others."""
    source = Path(importlib.import_module("trl.trainer.sft_trainer").__file__ or "").read_text("utf-8")
    return any(isinstance(node, ast.Constant) and words in str(node.value) for node in ast.walk(ast.parse(source)))


def _names(item: Any) -> set[str]:
    """What a test loads: the names in its body and among its parameters."""
    source = inspect.getsource(item.function)
    body = source[re.search(r"^\s*def ", source, re.MULTILINE).start() :]
    parameters = [repr(value) for value in getattr(getattr(item, "callspec", None), "params", {}).values()]
    lines = [line for line in [*body.splitlines(), *parameters] if not line.lstrip().startswith("#")]
    return set(_NAME.findall("\n".join(lines)))


@pytest.fixture(autouse=True)
def _ids_as_the_test_writes_them(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if _ID_OF_QWEN.search(inspect.getsource(request.function)):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(_HUB_WITH_REAL_IDS))


@pytest.fixture
def lazy_shared_datadir(request: pytest.FixtureRequest) -> Path:
    """The folder `data` beside the tests. TRL's fixture, of pytest-datadir, copies what is asked for."""
    return Path(request.path).parent / "data"


def pytest_unconfigure() -> None:
    shutil.rmtree(HOME, ignore_errors=True)
