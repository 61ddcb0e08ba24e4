"""A folder in place of the Hub, which huggingface_hub and datasets have to know before they are imported."""

import os
import tempfile
from pathlib import Path

HOME = Path(tempfile.mkdtemp(prefix="trl-upstream-"))
os.environ.update(HF_HOME=str(HOME), HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
os.environ.update(TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")
for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
    os.environ.pop(variable, None)
