"""`torch_compile`: what is compiled is what computes the loss. Several seconds a run, whatever the backend."""

import pytest
import torch
from feature_jobs import each, logs, trained
from torch._dynamo.utils import counters
from training import assert_same_gradients

pytestmark = pytest.mark.slow


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@each("`torch_compile`")
def test_compiled(tmp_path, job, model, dynamo):
    """A step gives the plain run's loss and gradient through one graph, and nothing that samples is compiled."""
    options = {"max_completion_length": 8} if job == "distill" else {}
    plain = trained(job, model, tmp_path, **options)
    assert not dynamo["frames"]
    compiled = trained(job, model, tmp_path, torch_compile=True, torch_compile_backend="eager", **options)
    frames = dict(dynamo["frames"])
    assert frames["ok"] == frames["total"] == (1 if job == "sft" else 2)  # the student, and the teacher
    assert logs(compiled)[0]["loss"] == pytest.approx(logs(plain)[0]["loss"], rel=1e-5)
    assert_same_gradients(compiled.gradients[0], plain.gradients[0], rtol=1e-4)
    student = compiled.accelerator.unwrap_model(compiled.model)
    student.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    assert dict(dynamo["frames"]) == frames
