"""One run, top to bottom: dataset, model, trainer, training, and everything that is left on disk after it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
import trl
from accelerate import PartialState

from . import checkpoints, progress, recipes, resume, run_lock, stops, summary
from ._trl import is_accelerator_there
from .benchmark_hook import check_program, run_benchmarks
from .checks.optimizer import check_optimizer
from .checks.preflight import (
    CHAT_TEMPLATES,
    ERROR,
    TEACHER_STOPS,
    WARNING,
    Finding,
    generation_stops,
    preflight,
    trained_stops,
)
from .data.load import load_splits, pick_split
from .data.mixture import Mixture, load_mixture
from .data.rows import DatasetError
from .distillation_trainer import DistillationTrainer
from .errors import RunError, UsageError
from .hub import PushCheckpoints, make_branch
from .launch import check_all_met
from .new_tokens import CHATML_NAME
from .process_log import set_up_logging
from .recipes import Settings
from .sft_trainer import SFTTrainer
from .shown import printable
from .student_setup import inner_tokenizer, is_adapter_folder, open_tokenizer

logger = logging.getLogger(__name__)

ECHO_SECONDS = 5.0

# what a user can mend; anything else is a bug, and its traceback is shown
MENDABLE = (UsageError, DatasetError, ValueError, TypeError, OSError, ImportError)


def main(job: str, argv: Sequence[str]) -> int:
    """`trl-opd sft` and `trl-opd distill`. Returns the exit code: 0, 2 for a wrong command, 143 or 130 where SIGTERM or
    SIGINT ended the run after a checkpoint, 1 for the rest."""
    argv, debug = without_debug_flag(argv)
    # TRL's use of transformers is TRL's to update, not the user's
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    try:
        settings = understand(job, argv)
    except MENDABLE as error:
        return say_error(job, error, debug, alike=True)
    try:
        set_up_logging(settings.training)
        trainer, checkpoint = build(settings)
    except MENDABLE as error:
        return say_error(job, error, debug)
    try:
        return train(trainer, settings, checkpoint)
    except (RunError, DatasetError) as error:  # the latter of a row in a stream
        return say_error(job, error, debug)


def understand(job: str, argv: Sequence[str]) -> Settings:
    """The settings of a command line, with all processes there that were asked for. Raises `UsageError`, and what the
    configs do."""
    settings = recipes.parse(job, argv)
    check_all_met(settings.training.world_size)
    return settings


def say_error(job: str, error: Exception, debug: bool, alike: bool = False) -> int:
    """Print an error that a user can mend, once and not once a process; returns the exit code. `alike`: every process
    says the same, for certain."""
    if debug:
        print(printable(traceback.format_exc()), file=sys.stderr)
    rank, message = os.environ.get("LOCAL_RANK", "0"), printable(in_our_words(error))
    code = 2 if isinstance(error, UsageError) else 1
    if rank != "0" and alike:
        return code
    if rank != "0" and getattr(error, "everywhere", True):
        time.sleep(ECHO_SECONDS)  # the first process mostly says the same, and the launcher then ends this one
    said = f"trl-opd {job}: error: {message}" if rank == "0" else f"trl-opd {job}: error in process {rank}: {message}"
    print(said, file=sys.stderr, flush=True)
    return code


# what others tell a Python user to do, and what to set here
_WORDS = {
    "Please pass the argument `trust_remote_code=True` to allow custom code to be run.": (
        "Set `trust_remote_code: true` if you have read that code and trust it."
    ),
    "Please check the target modules and try again.": (
        "Set `lora_target_modules` to names of its linear layers, or to `all-linear`."
    ),
}


def in_our_words(error: Exception) -> str:
    """An error's text, with what to set in the place of what to pass."""
    text = str(error)
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text


def without_debug_flag(argv: Sequence[str]) -> tuple[list[str], bool]:
    """`--debug` alone shows tracebacks; `--debug underflow_overflow` is transformers' own flag."""
    for i, flag in enumerate(argv):
        if flag == "--debug" and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            return [*argv[:i], *argv[i + 1 :]], True
    return list(argv), False


def run(job: str, argv: Sequence[str]) -> Any:
    """The same from Python, with exceptions: returns the trainer, trained and saved."""
    settings = understand(job, argv)
    trainer, checkpoint = build(settings)
    train(trainer, settings, checkpoint)
    return trainer


def build(settings: Settings, *, heed: bool = True) -> tuple[Any, str | None]:
    """The trainer, ready to start, and the checkpoint to go on from. Everything that can be wrong is found here; what
    preflight finds is left to the caller where `heed` is false.
    """
    args, model_args = settings.training, settings.model
    if model_args.model_name_or_path is None:
        raise UsageError("there is no model: set `model_name_or_path` to a folder or a model on the Hub")
    transformers.set_seed(args.seed)
    if not is_accelerator_there():
        args.dataloader_pin_memory = False
    check_program(args)
    check_optimizer(args)
    check_model_is_there(model_args, args.trust_remote_code)
    train_rows, eval_rows = load_rows(settings)
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    quantization = trl.get_quantization_config(model_args)
    if quantization is not None and is_accelerator_there():  # on this process's own GPU, not spread over all there are
        args.model_init_kwargs.setdefault("device_map", {"": PartialState().local_process_index})
    tokenizer = find_tokenizer(settings, train_rows)
    common = {
        "model": model_args.model_name_or_path,
        "args": args,
        "train_dataset": train_rows,
        "eval_dataset": eval_rows,
        "processing_class": tokenizer,
        "quantization_config": quantization,
        "peft_config": trl.get_peft_config(model_args),
    }
    if settings.job == "distill" and args.teacher_kind == "model":
        args.teacher_model_init_kwargs = {
            "attn_implementation": model_args.attn_implementation,
            "dtype": model_args.dtype,
            **(args.teacher_model_init_kwargs or {}),
        }
    was_there, ready, checkpoint = os.path.isdir(args.output_dir), False, None
    try:
        if heed:
            checkpoint = resume.claim(args.output_dir, args.resume_from_checkpoint, anyway=args.resume_anyway)
        trainer = SFTTrainer(**common) if settings.job == "sft" else DistillationTrainer(**common)
        progress.use_lines(trainer)
        if args.push_to_hub and args.hub_push_checkpoints:
            trainer.add_callback(PushCheckpoints(trainer))
        stop_at(trainer)
        if heed:
            stop_or_say(preflight(trainer))
            trainer.compare_with(checkpoint)
        ready = heed
    finally:
        if not ready:
            run_lock.release(args.output_dir)
            if not was_there:
                remove_if_empty(args.output_dir)  # `Trainer` makes it when constructed
    return trainer, checkpoint


def remove_if_empty(folder: str) -> None:
    """Remove a folder in which nothing was written."""
    if os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)


def check_model_is_there(model_args: Any, trust_remote_code: bool) -> None:
    """Raise `ValueError` naming the key where the model's config cannot be read."""
    name = model_args.model_name_or_path
    if is_adapter_folder(name):
        return  # it has no config of its own; its base is looked for when it is opened
    try:
        transformers.AutoConfig.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise
        raise ValueError(
            f"`model_name_or_path: {name}` is neither a folder with a model nor a model on the Hub that can be "
            f"reached: {str(error).splitlines()[0]} Set it to one of them."
        ) from error


def find_tokenizer(settings: Settings, train_rows: Any) -> Any:
    """The tokenizer that the recipe names; `None` for the model's own. For conversations a recipe of the open-r1 era
    gets ChatML where that has no template, as open-r1 did."""
    args, tokenizer = settings.training, None
    if settings.tokenizer is not None:
        try:
            tokenizer = transformers.AutoProcessor.from_pretrained(
                settings.tokenizer, trust_remote_code=args.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`tokenizer_name_or_path: {settings.tokenizer}` cannot be loaded: {error} Set it to a folder with a "
                "tokenizer, or leave it out to take the model's own."
            ) from error
    if not settings.chatml or args.chat_template is not None or args.chat_template_path is not None:
        return tokenizer
    sample: dict[str, Any] = next(iter(train_rows), {})
    if not any(isinstance(sample.get(name), list) for name in ("messages", "conversations", "prompt")):
        return tokenizer
    name = settings.model.model_name_or_path
    if is_adapter_folder(name):
        return tokenizer
    tokenizer = open_tokenizer(name, tokenizer, args)
    if inner_tokenizer(tokenizer).chat_template is None:
        logger.info("%s has no chat template, and rows are conversations: `chat_template: chatml`, as then", name)
        args.chat_template = CHATML_NAME
    return tokenizer


def load_rows(settings: Settings) -> tuple[Any, Any]:
    """Train rows, and eval rows where the run evaluates. Raises `DatasetError` or `UsageError` naming the key."""
    script, args = settings.script, settings.training
    wants_eval = args.eval_strategy != "no" or args.do_eval
    mixture = settings.mixture
    if mixture.datasets:
        name = mixture.key if isinstance(mixture, Mixture) else "datasets"
        if script.dataset_name:
            raise UsageError(f"both `{name}` and `dataset_name` are set: leave one of them out")
        if script.dataset_streaming:
            way = (
                "its shares are drawn from whole datasets" if isinstance(mixture, Mixture) else "set `streaming: true`"
            )
            raise UsageError(f"`dataset_streaming: true` does not go with `{name}`: {way}")
        splits = load_mixture(mixture) if isinstance(mixture, Mixture) else trl.get_dataset(mixture)
    elif script.dataset_name:
        name = script.dataset_name
        splits = load_splits(
            name, script.dataset_config, train_split=script.dataset_train_split, streaming=script.dataset_streaming
        )
    else:
        raise UsageError("there is no dataset: set `dataset_name` to a file, a folder or a dataset on the Hub")
    train = pick_split(splits, script.dataset_train_split, flag="dataset_train_split", name=name)
    if not wants_eval:
        return train, None
    return train, pick_split(splits, script.dataset_test_split, flag="dataset_test_split", name=name)


def stop_at(trainer: Any) -> None:
    """Let the saved model stop where it was trained to stop: add those tokens to its generation config."""
    config = trainer.model.generation_config
    if config is None:
        return
    had = generation_stops(trainer.model)
    config.eos_token_id = sorted(had | trained_stops(trainer) | ({trainer._tokenizer.eos_token_id} - {None}))


def stop_or_say(findings: list[Finding]) -> None:
    """Stop for what cannot work, and say what may not. Raises `ValueError`."""
    for finding in findings:
        if finding.level == ERROR:
            raise ValueError(f"{finding.name}: {finding.message}. {finding.fix[:1].upper()}{finding.fix[1:]}.")
        said = finding.name.endswith(" rows") or finding.name in (TEACHER_STOPS, CHAT_TEMPLATES)  # by the trainer
        if finding.level == WARNING and not said:
            logger.warning("%s: %s. %s", finding.name, finding.message, finding.fix)


def write_mask_report(trainer: Any) -> None:
    """`mask_report.json` in `output_dir`: what happened to the rows of every dataset."""
    os.makedirs(trainer.args.output_dir, exist_ok=True)
    path = os.path.join(trainer.args.output_dir, "mask_report.json")
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump({report.name: report.as_dict() for report in trainer.data_reports}, file, indent=2)
    os.replace(path + ".part", path)


def train(trainer: Any, settings: Settings, checkpoint: str | None) -> int:
    """Train, save, evaluate, push: what a user finds in `output_dir` afterwards. Returns the exit code."""
    args = trainer.args
    teacher = getattr(args, "teacher_model_name_or_path", None)
    if trainer.is_world_process_zero():
        summary.show(summary.start_table(trainer, teacher, checkpoint))
        summary.show_samples(trainer, 2, longest=600)
        write_mask_report(trainer)
    make_branch(trainer)
    with stops.heeding_signals(trainer) as stop:
        result = trainer.train(resume_from_checkpoint=checkpoint)
    if stop.signal:
        logger.info("stopped after step %s; the same command goes on from there", trainer.state.global_step)
        return 128 + stop.signal

    save_metrics(trainer, "train", result.metrics)
    trainer.save_state()
    trainer.model.config.use_cache = True  # off while training; the saved model generates with it
    save_whole(trainer)
    dataset_name = settings.script.dataset_name
    if dataset_name is not None and os.path.exists(dataset_name):
        dataset_name = None  # of a model card's readers nobody has this file
    if trainer.is_world_process_zero():
        trainer.create_model_card(dataset_name=dataset_name)
    if trainer.eval_dataset is not None:
        save_metrics(trainer, "eval", trainer.evaluate())
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        logger.info("saved to %s", args.output_dir)
        run_benchmarks(args, getattr(trainer, "hub_model_id", None))  # the other processes are done and do not wait
    return 0


def save_whole(trainer: Any) -> None:
    """The trained model in `output_dir`, file by file from a folder beside it: no file there is ever half-written."""
    output_dir = Path(trainer.args.output_dir)
    staged = output_dir / checkpoints.STAGING / "model"
    trainer.save_model(str(staged), _internal_call=True)  # which pushes nothing yet
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        for path in staged.iterdir():
            os.replace(path, output_dir / path.name)
        shutil.rmtree(staged.parent, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def save_metrics(trainer: Any, split: str, metrics: dict[str, Any]) -> None:
    """Log and save the metrics of `train` or `eval`, with the number of rows they are of where it is known."""
    rows = getattr(trainer, f"{split}_dataset")
    kept = [report.kept for report in trainer.data_reports if report.name == split and not report.streamed]
    if kept:
        metrics[f"{split}_samples"] = kept[-1]  # packing makes fewer rows of them
    elif hasattr(rows, "__len__"):
        metrics[f"{split}_samples"] = len(rows)
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)
