"""What both trainers do alike: score inside the wrapped forward, count tokens, log sums, evaluate exactly."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger

from . import heads
from ._trl import ForwardRedirection, attends_by_lengths, attention_of
from .checkpointed_trainer import CheckpointedTrainer
from .compiled import backbones_for
from .data.collate import SIZES
from .data.pieces import pieces
from .data.report import MaskReport
from .data.sampler import PromptStream, WindowSampler
from .flat import why_padded
from .layouts import gathered, shards_weights
from .lora_linear import use_lora_linear
from .losses.reduce import row_sums
from .metrics import MetricSums
from .nonfinite import NonFiniteGuard
from .row_attention import attend_row_by_row, is_transformers_own
from .throughput import Stopwatch, peak_memory_gib
from .types import IGNORE_INDEX, FusedOutput, TrainedPositions

logger = get_logger(__name__)


class TokenLevelTrainer(NonFiniteGuard, CheckpointedTrainer):
    """Mixed into a TRL trainer, before it. Needs `_start_accounting()` once TRL's constructor is done."""

    # what the TRL trainer it is mixed into brings
    args: Any
    accelerator: Any
    data_collator: Any
    model: Any
    _tr_loss: torch.Tensor
    _train_batch_size: int
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _buffered_inputs: Any
    data_reports: list[MaskReport]
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    _all_flat: bool  # no model of a step runs padding
    _beside: tuple[Any, ...] = ()  # frozen models that score beside the trained one
    _metrics: dict[str, Any]

    def _start_accounting(self) -> None:
        self._sums = {"train": MetricSums(), "eval": MetricSums()}
        self._eval_total = torch.zeros(2, dtype=torch.float64)  # loss sum and trained tokens of an evaluation
        self._window_sampler: WindowSampler | PromptStream | None = None
        self._stopwatch, self._tokens_since_log = Stopwatch(), torch.zeros((), device=self.accelerator.device)
        self._compiled = backbones_for(self)
        if not self.args.torch_compile and (layers := use_lora_linear(self.model)):
            logger.info(f"LoRA: {layers} layers add up inside their matrix products, where one plain adapter is on")
        self._start_guard()

    def _note_report(self, report: MaskReport) -> None:
        """Keep a dataset's report, and say at once what was not used as it came."""
        self.data_reports.append(report)
        for line in report.warnings():
            logger.warning(line)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        # `Trainer` derives the epoch from `global_step`; its own `set_epoch` does not reach a sampler that skips and
        # shards, so a resumed run would replay epoch 0
        if self._window_sampler is not None:
            self._window_sampler.set_epoch(kwargs["epoch"])
        if kwargs["epoch"] == kwargs["epochs_trained"]:
            self._count_anew()
        return super()._run_epoch(*args, **kwargs)

    def _count_anew(self) -> None:
        """Forget what was counted of steps that this run does not go on from, where `auto_find_batch_size` has ended
        them."""
        self._stopwatch.stop()
        self._tokens_since_log.zero_()
        if self.args.auto_find_batch_size:
            self._sums["train"] = MetricSums()
            self._metrics["train"].clear()
            if self._train_batch_size != self.args.train_batch_size:
                logger.warning(
                    f"auto_find_batch_size: {self._train_batch_size} rows a micro-batch in the place of "
                    f"{self.args.train_batch_size}, which memory does not hold. Counts, rows and schedule start again; "
                    "steps that were taken before are in the weights."
                )

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._stopwatch.start()
        return super().training_step(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        self._stopwatch.leave_out(began)

    def _count_tokens(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Add the real tokens of a training micro-batch to those since the last log, and return them, (). A row that
        only evens out the ranks has no label and does not count."""
        mask, labels = inputs.get("attention_mask"), inputs.get("labels")
        if mask is None or mask.dim() != 2 or labels is None:
            tokens = torch.tensor(inputs["input_ids"].numel())
        else:
            tokens = (mask * (labels != IGNORE_INDEX).any(1, keepdim=True)).sum()
        self._tokens_since_log += tokens
        return tokens

    def _throughput(self) -> dict[str, float]:
        """`tokens_per_second` of all ranks since the last log, and the `peak_memory_gib` of the rank with the most."""
        seconds, device = self._stopwatch.lap(), self.accelerator.device
        here = torch.stack([self._tokens_since_log, torch.full((), peak_memory_gib(device), device=device)])
        tokens, peaks = self.accelerator.gather(here.unsqueeze(0)).cpu().unbind(1)
        self._tokens_since_log.zero_()
        rate = {"tokens_per_second": float(tokens.sum()) / seconds} if seconds else {}
        return {**rate, "peak_memory_gib": float(peaks.max())}

    def _own_state(self) -> dict[str, Any]:
        """What has been counted since the last log: the next one is then that of a run that never stopped."""
        kept = {
            "loss": self._tr_loss,
            "last_logged": self._globalstep_last_logged,
            "sums": self._sums["train"].rows(),
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
        }
        return {**super()._own_state(), "since_last_log": kept}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        super()._load_own_state(state)
        kept = state["since_last_log"]
        self._tr_loss, self._globalstep_last_logged = kept["loss"], kept["last_logged"]
        # the mean loss of this `train()` does not take in what an earlier one has trained
        self._total_loss_scalar -= self.accelerator.gather(self._tr_loss.reshape(1)).mean().item()
        self._sums["train"].restore(kept["sums"])
        for name, values in kept["metrics"].items():
            self._metrics["train"][name] = values

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _in_wrapped_forward(self, model: torch.nn.Module, score: Callable[..., FusedOutput], *args: Any) -> FusedOutput:
        """Run `score(unwrapped, *args)` as the forward of the wrapped model, under autocast.

        DDP, ZeRO and FSDP only see gradients that come out of their own forward; and the redirected forward is not the
        one that accelerate patched, so autocast has to be entered here.
        """
        unwrapped, kept = self.accelerator.unwrap_model(model), []

        def scored(*_: Any) -> tuple:
            with self.accelerator.autocast(), self._compiled.used(unwrapped, *self._beside):
                out = score(unwrapped, *args)  # not what came through the wrapper: FSDP casts all floats
            kept.append(out)
            return out.loss_sum, out.per_token, out.metrics  # wrappers look for tensors in tuples and dicts only

        batch = dict(args[0])  # `score` takes out what the models are not given
        returned = ForwardRedirection()(model, unwrapped, scored, *args)
        # FSDP casts what it returns too: a loss in bf16 is a gradient that is off by as much. Its hooks are on `kept`.
        out = kept[0] if self.is_fsdp_enabled else FusedOutput(*returned)
        return replace(out, loss_sum=self._note_loss(out.loss_sum, batch, args[1], out.per_token))

    def _leaves_out_padding(self, model: Any, whose: str) -> bool:
        """Whether a model is run on rows without padding; the choice is logged with its reason."""
        inner = heads.causal_lm(model)
        attention, backbone = attention_of(inner), inner.base_model
        why_not = why_padded(backbone, attention, self.accelerator.device.type, attends_by_lengths(backbone))
        if attention == "sdpa" and self.args.torch_compile:
            why_not = why_not or "torch_compile would compile SDPA anew for rows of other lengths"
        if attention == "sdpa" and not is_transformers_own():
            why_not = why_not or "another function was registered as `sdpa`"
        if model is self.model and self.args.neftune_noise_alpha:
            why_not = why_not or "NEFTune's noise goes by the length of the padded rows"
        logger.info(f"{whose}: padding is {f'kept: {why_not}' if why_not else f'left out ({attention})'}")
        if attention == "sdpa" and not why_not:
            attend_row_by_row()
        return not why_not

    @property
    def _merges(self) -> bool:
        """Whether the rows of a step may be run in fewer micro-batches than it has, by their tokens: processes then
        differ in passes."""
        each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        as_many = self.is_deepspeed_enabled or self.is_fsdp_enabled or each
        return self.args.balance_micro_batches and self.args.per_device_max_tokens is None and not as_many

    def _sum_of_pieces(
        self, model: torch.nn.Module, inputs: dict[str, Any], loss_of: Callable[[dict[str, Any]], torch.Tensor]
    ) -> torch.Tensor:
        """`loss_of(inputs)`; in training, in pieces of at most `per_device_max_tokens`.

        Every piece but the last is back-propagated here, with its graph freed, and no gradient sent: the last one is
        left to `Trainer`, which sees one loss and one backward pass for the micro-batch.
        """
        if not len(inputs["labels"]):  # its rows are in other micro-batches of the step
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        if self.args.per_device_max_tokens is None or not (self.model.training and torch.is_grad_enabled()):
            return loss_of(inputs)
        *early, last = self._pieces(inputs)
        done: Any = 0.0
        self._more_pieces = True
        for piece in early:
            with self.accelerator.no_sync(model):
                loss = loss_of(piece)
                self.accelerator.backward(loss)
            done = done + loss.detach()
        self._more_pieces = False
        return loss_of(last) + done

    def _pieces(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """A micro-batch, whole or in the pieces that `per_device_max_tokens` asks for."""
        budget = self.args.per_device_max_tokens
        if budget is None or SIZES not in inputs:  # a batch that a script of one's own brings has none
            return [inputs]
        longest = max(inputs[SIZES].tokens)
        if longest > budget:
            logger.warning_once(
                f"per_device_max_tokens is {budget}, and a row has {longest} tokens: rows that are longer are run one "
                "at a time. Further ones are not reported."
            )
        return pieces(inputs, budget, self.args.pad_to_multiple_of, self._all_flat)

    @property
    def _ranks(self) -> heads.Ranks:
        return heads.Ranks(gathered, self._longest)

    def _longest(self, positions: int) -> int:
        if not shards_weights(self.accelerator.state):
            return 0
        return int(self.accelerator.gather(torch.tensor([positions], device=self.accelerator.device)).max())

    def _count_evaluated(self, per_token: torch.Tensor, positions: TrainedPositions, num_rows: int) -> None:
        """Add a batch to the evaluation's sums; rows that only even out the ranks are left out by `gather`."""
        sums, counts = row_sums(per_token, positions.rows, num_rows)
        table = self.accelerator.gather_for_metrics(torch.stack([sums, counts], dim=1))  # (rows, 2)
        self._eval_total += table.double().sum(0).cpu()

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """The loop of `Trainer`, whose loss becomes Σ per-token / N of the whole set: one value, whatever the batch."""
        self._eval_total = torch.zeros(2, dtype=torch.float64)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]
        loss_sum, tokens = self._eval_total.tolist()
        if tokens:
            output.metrics[f"{metric_key_prefix}_loss"] = loss_sum / tokens
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's `log` with our sums reduced over the ranks first.

        Only where `Trainer` itself logs, on every rank: a callback may well log on one rank alone.
        """
        if "loss" in logs or any(key.endswith("_runtime") for key in logs):
            for name, value in self._sums[self._mode].pop_means(self.accelerator.gather).items():
                self._metrics[self._mode][name] = [value]
        if "loss" in logs:
            for name, value in self._throughput().items():
                self._metrics["train"][name] = [value]
        super().log(logs, start_time)
