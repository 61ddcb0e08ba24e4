"""Small frozen records that the parts hand to each other. Letters: B batch, T time, N trained positions, V vocabulary,
H hidden."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100  # a label that is not trained (torch's and transformers' convention)

Message = dict[str, Any]


@dataclass(frozen=True)
class TrainedPositions:
    """Where a batch's trained tokens are, relative to the batch-minimum slice `hidden[:, start - 1 : T - 1]`.

    `start` is the smallest index of a labelled token in the batch; `index` (N,) int64 points into the flattened slice
    of width `T - start`, at the position that *predicts* each trained token; `rows` (N,) int64 is the row it belongs
    to; `targets` (N,) int64 is the trained token itself.
    """

    start: int
    index: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return self.targets.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TrainedPositions:
        """The same positions on another device."""
        moved = (x.to(device, non_blocking=non_blocking) for x in (self.index, self.rows, self.targets))
        return TrainedPositions(self.start, *moved)


@dataclass(frozen=True)
class RowSizes:
    """What is known of a batch's rows without asking the device: their real tokens, how many of them are trained, and
    whether the student did not write them (empty where nobody asks)."""

    tokens: tuple[int, ...]
    trained: tuple[int, ...]
    off_policy: tuple[bool, ...] = ()


@dataclass(frozen=True)
class FusedOutput:
    """What the fused head returns for N trained positions.

    `loss_sum` () fp32, differentiable: the sum over the positions, which the caller divides. `per_token` (N,) fp32 and
    `metrics`, (N,) each by name, are detached: `entropy` of the student in nats always; `correct` (the target is its
    most likely token) for cross-entropy; what else the objective knows (see `trl_opd.losses.objectives`).
    """

    loss_sum: torch.Tensor
    per_token: torch.Tensor
    metrics: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Example:
    """One row of a dataset, read and checked.

    `kind` is one of `text`, `prompt_completion`, `messages`, `prompt_completion_messages`, `prompt`,
    `prompt_messages`. `prompt` and `completion` are text for the first two and lists of messages otherwise; `text`
    rows have only `completion`, `messages` rows too. `tools` and `template_kwargs` go to the chat template.
    """

    kind: str
    prompt: str | list[Message] | None = None
    completion: str | list[Message] | None = None
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizedRow:
    """`input_ids` (T,) and `labels` (T,), equal where the token is trained and -100 elsewhere.

    `stopped`: what is trained ends with a stop token. `normalized`: the chat template changed whitespace in it. `rule`
    says how the trained spans were found.
    """

    input_ids: list[int]
    labels: list[int]
    stopped: bool = True
    normalized: bool = False
    rule: str = ""


@dataclass(frozen=True)
class Rollout:
    """One rank's share of a generation window, R rows: what was asked, what was written, by whom, what is trained.

    `labels` are as long as the completions, -100 where a token is not trained. `weights` is 0 for a row that only fills
    the last window of an epoch: it has no label. `on_policy` is true where the student wrote the completion.
    `teacher_prompt_ids` are what the teacher is shown in place of `prompt_ids`, where that differs.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    labels: list[list[int]]
    weights: list[int]
    on_policy: list[bool]
    teacher_prompt_ids: list[list[int]] | None = None
