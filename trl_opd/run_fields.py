"""Fields that both configs have, on what a run does around the training."""

from __future__ import annotations

from dataclasses import dataclass, field

from .benchmark_hook import check_command


@dataclass
class RunFields:
    """Mixed into both configs, before TRL's. Raises `ValueError` for a value that cannot be."""

    added_tokens: list[str] | None = field(
        default=None,
        metadata={
            "help": "Tokens that the tokenizer is given where it lacks them, such as `<think>`; the model gets a row "
            "of embedding and head for each, which an adapter trains and saves too."
        },
    )
    added_special_tokens: list[str] | None = field(
        default=None,
        metadata={
            "help": "The same for special tokens, which end a turn or stand in the chat template and are left out of "
            "decoded text, such as `<|im_end|>`."
        },
    )
    pad_embeddings_to_multiple_of: int | None = field(
        default=None,
        metadata={"help": "Rows of embedding and head are filled up to a multiple of this, 64 for example."},
    )
    benchmarks: list[str] | None = field(
        default=None,
        metadata={"help": "Benchmarks that `benchmark_command` is run for, once the model is saved."},
    )
    benchmark_command: str | None = field(
        default=None,
        metadata={
            "help": "The command of a benchmark, without a shell, as in `lighteval accelerate model_name={model} "
            "{task}`. `{model}` is the folder that was saved, `{task}` the benchmark, `{output_dir}` one for files; "
            "`{hub_model_id}`, `{revision}` and `{system_prompt}` are those of the run."
        },
    )
    hub_push_checkpoints: bool = field(
        default=False,
        metadata={
            "help": "With `push_to_hub`: push every checkpoint to a branch of its own, `<hub_revision>-step-<step>`."
        },
    )

    def __post_init__(self) -> None:
        multiple = self.pad_embeddings_to_multiple_of
        if multiple is not None and multiple < 1:
            raise ValueError(f"pad_embeddings_to_multiple_of is {multiple}; it must be at least 1.")
        for name in ("added_tokens", "added_special_tokens"):
            tokens = getattr(self, name) or []
            if any(not isinstance(token, str) or not token.strip() for token in tokens):
                raise ValueError(f"{name} is {tokens}; every token must be a text that is not blank.")
        both = set(self.added_tokens or []) & set(self.added_special_tokens or [])
        if both:
            raise ValueError(
                f"{sorted(both)[0]!r} is in `added_tokens` and in `added_special_tokens`: keep one of them."
            )
        check_command(self.benchmarks, self.benchmark_command)
        super().__post_init__()  # type: ignore[misc]  # of TRL's config
