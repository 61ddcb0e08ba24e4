"""Exact match of greedy answers on the held-out problems, for a model folder or a LoRA adapter folder."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

HELDOUT = Path("runs/smollm2/data/heldout.jsonl")

EPILOG = """commands that run, from the repository root, after prepare.py and the two trainings:
  python examples/smollm2/evaluate.py runs/smollm2/SmolLM2-135M-Instruct
  python examples/smollm2/evaluate.py runs/smollm2/student-lora --output runs/smollm2/student-lora.json
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Answer every held-out problem greedily and count the exact matches.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="model folder, or PEFT adapter folder")
    parser.add_argument("--data", type=Path, default=HELDOUT, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the score and every completion to this JSON file")
    parser.add_argument("--batch_size", type=int, default=50, help="default: %(default)s")
    # The longest right answer is 4 tokens with its end-of-turn token; 16 lets a wordy answer show itself.
    parser.add_argument("--max_new_tokens", type=int, default=16, help="default: %(default)s")
    args = parser.parse_args(argv)
    if not args.model.is_dir():
        parser.error(f"model: no folder {args.model}")
    if not args.data.is_file():
        parser.error(f"--data: no file {args.data}; `python examples/smollm2/prepare.py` writes it")
    return args


def load(folder: Path) -> tuple[Any, Any]:
    """Return the float32 model in eval mode and the left-padding tokenizer of a model or adapter folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter_config = folder / "adapter_config.json"
    is_adapter = adapter_config.is_file()
    base = json.loads(adapter_config.read_text())["base_model_name_or_path"] if is_adapter else str(folder)
    try:
        # An adapter has no tokenizer of its own to trust: prompts must be what its base model gets.
        tokenizer: Any = AutoTokenizer.from_pretrained(base, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    except OSError as error:
        if not is_adapter:
            raise
        # The trainer stores the path it was given; a relative one only works from the same place.
        raise SystemExit(
            f"{adapter_config}: cannot load base_model_name_or_path={base!r}; run from the directory "
            f"the training was started in ({error})"
        ) from error
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def generate(model: Any, tokenizer: Any, prompts: list[list[dict[str, str]]], max_new_tokens: int) -> list[str]:
    """Return the stripped greedy completion of each chat prompt.

    The chat template renders the prompts, with their system message and the opening of the assistant's turn:
    the same text that the trainers build.
    """
    import torch

    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    # pad == eos here, so padding can only be told from text by the attention mask: always pass it.
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)  # (B, T + new)
    new = output[:, inputs["input_ids"].shape[1] :]  # left padding: every completion starts in the same column
    return [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()]
    model, tokenizer = load(args.model)

    completions: list[str] = []
    for start in range(0, len(rows), args.batch_size):
        prompts = [row["prompt"] for row in rows[start : start + args.batch_size]]
        completions += generate(model, tokenizer, prompts, args.max_new_tokens)
    correct = [completion == row["answer"] for completion, row in zip(completions, rows, strict=True)]

    print(f"exact match: {sum(correct) / len(rows):.3f} ({sum(correct)}/{len(rows)})")
    for row, completion in list(zip(rows, completions, strict=True))[:3]:
        print(f"  {row['prompt'][-1]['content']} -> {completion!r} (answer {row['answer']})")
    if args.output is not None:
        samples = [
            {**row, "completion": completion, "correct": right}
            for row, completion, right in zip(rows, completions, correct, strict=True)
        ]
        score = {"exact_match": sum(correct) / len(rows), "correct": sum(correct), "total": len(rows)}
        write_json(args.output, {"model": str(args.model), "data": str(args.data), **score, "samples": samples})


if __name__ == "__main__":
    main()
