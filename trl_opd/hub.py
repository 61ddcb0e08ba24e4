"""Branches on the Hub: the one that `hub_revision` names, and one for every checkpoint."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from typing import Any

import huggingface_hub
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

# other checkpoints, and what only a resume needs
LEFT_OUT = ["checkpoint-*", "*.pth", "*.pt"]


def make_branch(trainer: Any) -> None:
    """Make the branch that `hub_revision` names: a push to one that does not exist is refused."""
    args = trainer.args
    if args.push_to_hub and args.hub_revision and trainer.is_world_process_zero():
        huggingface_hub.create_branch(
            trainer.hub_model_id, branch=args.hub_revision, token=args.hub_token, exist_ok=True
        )


class PushCheckpoints(TrainerCallback):
    """Push every checkpoint, without the state that only a resume needs, to a branch `<revision>-step-<9 digits>`.

    In the background, one at a time; a save waits for the last push, because it may delete that checkpoint. A push that
    fails is said and counted, and training goes on.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.pushing: tuple[str, Future] | None = None
        self.failed: list[str] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        branch = f"{args.hub_revision or 'main'}-step-{state.global_step:09d}"
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        self._finish()
        api = huggingface_hub.HfApi(token=args.hub_token)
        self.pushing = branch, api.run_as_future(push, self.trainer.hub_model_id, folder, branch, args.hub_token)
        if state.global_step >= state.max_steps:
            self._finish()  # the trainer may delete it before it says that training has ended

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            self._finish()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            self._finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._finish()
        if self.failed:
            logger.warning("%d checkpoints were not pushed: %s", len(self.failed), ", ".join(self.failed))

    def _finish(self) -> None:
        if self.pushing is None:
            return
        (branch, future), self.pushing = self.pushing, None
        error = future.exception()
        if error is None:
            logger.info("pushed a checkpoint to %s, branch %s", self.trainer.hub_model_id, branch)
        else:
            self.failed.append(branch)
            logger.warning("a checkpoint was not pushed to branch %s: %s", branch, str(error).split("\n")[0])


def push(repo: str, folder: str, branch: str, token: str | None) -> None:
    """Upload a folder to a branch of its own, which starts at the first commit of the repository."""
    first = huggingface_hub.list_repo_commits(repo, token=token)[-1].commit_id
    huggingface_hub.create_branch(repo, branch=branch, revision=first, token=token, exist_ok=True)
    huggingface_hub.upload_folder(
        repo_id=repo,
        folder_path=folder,
        revision=branch,
        commit_message=f"Add {branch} checkpoint",
        ignore_patterns=LEFT_OUT,
        token=token,
    )
