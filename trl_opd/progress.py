"""What a run prints while it goes: one line a log, beside the bar. Everything else is in the trackers and in
`trainer_state.json`."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback

_SHORT = {
    "loss": "loss",
    "eval_loss": "eval loss",
    "grad_norm": "grad norm",
    "learning_rate": "lr",
    "entropy": "entropy",
    "mean_token_accuracy": "accuracy",
    "sft/num_tokens_per_step": "tokens/step",
    "distill/num_tokens_per_step": "tokens/step",
    "distill/top1_agreement": "agreement",
    "distill/reward": "reward",
    "distill/sft_loss": "sft loss",
    "distill/anchor_kl": "anchor kl",
    "distill/on_policy_rows": "on policy",
    "distill/horizon": "horizon",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "clipped",
    "step_time": "s/step",
    "tokens_per_second": "tokens/s",
    "peak_memory_gib": "peak GiB",
}
_HIDDEN = (
    "epoch",
    "num_tokens",
    "total_flos",
    "completions/min_",
    "completions/max_",
    "completions/mean_terminated",
    "distill/teacher_entropy",
    "distill/forward_kl",
    "distill/reverse_kl",
    "distill/reward_",
    "distill/repetition",
)


def line(logs: dict[str, Any], step: int) -> str:
    """A log as one line, the main names first; a name that we do not know is shown as it is."""
    known = [(short, logs[name]) for name, short in _SHORT.items() if name in logs]
    other = [(name, value) for name, value in logs.items() if name not in _SHORT and _is_worth_a_look(name, value)]
    return f"step {step:>5}  " + "  ".join(f"{name} {_shown(value)}" for name, value in known + other)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _is_worth_a_look(name: str, value: Any) -> bool:
    if name in ("distill/empty_steps", "sft/nonfinite_steps", "distill/nonfinite_steps"):
        return bool(value)
    return not name.removeprefix("eval_").startswith((*_HIDDEN, "runtime", "samples_per", "steps_per", "model_prep"))


class ProgressLines(ProgressCallback):
    """Transformers' bar with our lines."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs and "train_runtime" not in logs:
            self.training_bar.write(line(logs, state.global_step))


class PlainLines(PrinterCallback):
    """The same lines without a bar, for `disable_tqdm`."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            print(line(logs, state.global_step))


def use_lines(trainer: Any) -> None:
    """Put our lines in the place of transformers' printed dictionaries."""
    for theirs, ours in ((ProgressCallback, ProgressLines), (PrinterCallback, PlainLines)):
        if trainer.pop_callback(theirs) is not None:
            trainer.add_callback(ours)
