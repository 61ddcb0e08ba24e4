"""Tiny models and byte-level tokenizers, built offline. Tests never reach a hub and use one thread."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import logging

import feature_table
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True)  # CI judges a change, not the luck of a draw
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def log_level():
    """A command sets how much is logged, for its process: the next test is another one."""
    yield
    logging.getLogger("trl_opd").setLevel(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    feature_table.note(config, items)


def pytest_collection_finish():
    """What importing has made stays: `Trainer.train` collects garbage, and going through it all takes a second."""
    gc.freeze()
