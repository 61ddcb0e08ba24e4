"""Which of TRL's tests ours are known to fail, with which error, and why that is meant."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

OURS, BOTH = ("ours",), ("ours", "trainers")


@dataclass(frozen=True)
class Difference:
    """A test fails with `error`, whose text holds `match`, where the run takes one of `classes`. `other_teacher` is
    whether that option has to be there (`None`: with and without it)."""

    why: str
    error: type[BaseException]
    match: str
    classes: tuple[str, ...] = BOTH
    other_teacher: bool | None = None


_TOO_LONG = Difference("rows over `max_length` are an error", ValueError, "are longer than `max_length", OURS)
_OWN_TEACHER = Difference(
    "the student's own checkpoint is no teacher", ValueError, "Student and teacher are both", other_teacher=False
)
_IMAGES = Difference("no images in distillation", ValueError, "Models that take images", other_teacher=True)
_TOKENIZED = "prompts are tokenized when the trainer is made, into a dataset of its own"
_ROWS = Difference(_TOKENIZED, AssertionError, "'prompt_ids'")
_STREAM = Difference(_TOKENIZED, AssertionError, "IterableDataset.* is IterableDataset")

# By file and test; a test with parameters by its name alone where all of them differ.
DIFFERS: dict[str, dict[str, tuple[Difference, ...]]] = {
    "test_sft_trainer": {
        "test_train_model_dtype": (
            Difference(
                "a loss that is not finite stops the run (`on_nonfinite`)", RuntimeError, "rows is not finite", BOTH
            ),
        ),
        "test_train_packing[bfd]": (_TOO_LONG,),
        "test_dataset_truncated_to_max_length": (_TOO_LONG,),
        "test_fully_masked_examples_dropped_after_truncation": (
            _TOO_LONG,
            Difference(
                "a row with nothing left to train is an error (`bad_rows`)",
                ValueError,
                "its prompt alone fills max_length",
                ("trainers",),
            ),
        ),
        "test_dataset_preparation_respects_existing_labels": (
            Difference("the first token has no label, since nothing predicts it", AssertionError, "-100, -100, 3"),
        ),
    },
    "test_distillation_trainer": {
        "test_init_with_train_dataset[dataset]": (_ROWS,),
        "test_init_with_train_dataset[iterable_dataset]": (_STREAM,),
        "test_init_with_eval_dataset[dataset]": (_ROWS,),
        "test_init_with_eval_dataset[iterable_dataset]": (_STREAM,),
        "test_peft_lm_head_adapter_raises": (
            Difference("LoRA on the head is trained", pytest.fail.Exception, "DID NOT RAISE"),
        ),
        "test_teacher_vocab_size_mismatch_raises": (
            Difference(
                "token ids are compared, not sizes: another message", AssertionError, "do not share a tokenizer"
            ),
        ),
        "test_train_with_tools": (Difference("no tools in distillation", ValueError, "`tools` are not supported"),),
        "test_train_stops_on_every_eos_token_id": (_OWN_TEACHER,),
        "test_trust_remote_code": (
            Difference(_OWN_TEACHER.why, AssertionError, _OWN_TEACHER.match, other_teacher=False),
        ),
        "test_pad_token_id_synced_with_model_config": (_OWN_TEACHER,),
        "test_train_vlm": (_OWN_TEACHER, _IMAGES),
        "test_train_vlm_gradient_accumulation": (_OWN_TEACHER, _IMAGES),
    },
}


def expected(file: str, test: str, classes: str, other_teacher: bool = False) -> pytest.MarkDecorator | None:
    """The mark of a test that is known to fail: it fails in any other way, and where it passes, as well."""
    named = DIFFERS.get(file, {})
    for differs in named.get(test, named.get(re.sub(r"\[.*", "", test), ())):
        if classes in differs.classes and differs.other_teacher in (None, other_teacher):
            error = pytest.RaisesExc(differs.error, match=f"(?s){differs.match}")
            return pytest.mark.xfail(raises=error, reason=differs.why, strict=True)
    return None
