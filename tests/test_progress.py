"""One readable line a log."""

from trl_opd.progress import line


def test_a_log_is_one_line_with_the_main_names_first():
    logs = {"epoch": 0.5, "my_metric": 2, "grad_norm": 0.31759, "loss": 1.25, "completions/min_length": 3.0}
    assert line(logs, 20) == "step    20  loss 1.25  grad norm 0.3176  my_metric 2"
    logs = {"eval_loss": 0.5, "eval_runtime": 1.0, "eval_samples_per_second": 9.0, "eval_bleu": 30.0, "epoch": 1.0}
    assert line(logs, 7) == "step     7  eval loss 0.5  eval_bleu 30"


def test_large_numbers_are_written_out():
    assert line({"tokens_per_second": 13934.6, "loss": 0.1}, 3) == "step     3  loss 0.1  tokens/s 13,935"


def test_steps_without_a_trained_token_are_never_hidden():
    assert "distill/empty_steps 0.5" in line({"distill/empty_steps": 0.5}, 1)
    assert "empty" not in line({"distill/empty_steps": 0.0}, 1)
