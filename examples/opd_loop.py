"""On-policy distillation from top to bottom, in one file and without a Trainer.

The student writes completions, the teacher grades every token of them, the student moves towards the teacher. This is
what `trl-opd distill` does, minus everything that makes it fast, resumable and distributed; `tests/test_examples.py`
holds that both take the same loss and the same gradient. Run it on what `make demo` leaves behind:

    python examples/opd_loop.py
    python examples/opd_loop.py --student MODEL --teacher MODEL --prompts prompts.jsonl --max_new_tokens 256

Letters: B rows, T time, N trained tokens, V vocabulary.
"""

import argparse
import json
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def sample(student, prompt_ids: list[list[int]], stop: set[int], pad: int, max_new_tokens: int) -> list[list[int]]:
    """The student's own completions at temperature 1, each up to and including its first stop token.

    Plain sampling: a top-k or top-p filter would draw from another policy than the one whose loss is taken. Dropout is
    off, or the student would write as somebody it is not.
    """
    longest = max(map(len, prompt_ids))
    # padded on the left, so that every completion starts in the same column
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompt_ids])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompt_ids])
    student.eval()
    with torch.no_grad():
        out = student.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=sorted(stop),
            pad_token_id=pad,
        )
    student.train()
    completions = []
    for row in out[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in stop), len(row) - 1)
        completions.append(row[: end + 1])  # the pad token may equal the stop token: cut by position, not by value
    return completions


def make_batch(prompt_ids, completion_ids, pad: int):
    """Input ids, attention mask and labels, (B, T) each: a label is the token itself where it is trained, else -100."""
    rows = [p + c for p, c in zip(prompt_ids, completion_ids, strict=True)]
    longest = max(map(len, rows))
    input_ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    labels = torch.full_like(input_ids, -100)
    for labelled, prompt, row in zip(labels, prompt_ids, rows, strict=True):
        labelled[len(prompt) : len(row)] = torch.tensor(row[len(prompt) :])
    return input_ids, mask, labels


def reverse_kl_sum(student, teacher, input_ids, mask, labels) -> tuple[torch.Tensor, int]:
    """Σ KL(student ‖ teacher) over the trained tokens, and N. The gradient flows through the student only."""
    # the logits at t predict the token at t + 1, so a token is graded by the column before it
    trained = labels[:, 1:] != -100  # (B, T-1)
    log_p = student(input_ids=input_ids, attention_mask=mask).logits[:, :-1][trained].float().log_softmax(-1)  # (N, V)
    with torch.no_grad():
        log_q = teacher(input_ids=input_ids, attention_mask=mask).logits[:, :-1][trained].float().log_softmax(-1)
    per_token = (log_p.exp() * (log_p - log_q)).sum(-1)  # (N,)
    return per_token.sum(), int(trained.sum())


def opd_step(student, teacher, prompt_ids, completion_ids, pad: int, micro_batch: int) -> float:
    """One optimizer step's gradient, in micro-batches. Returns the loss.

    The divisor is the number of trained tokens of the whole step. A mean per micro-batch, averaged, would weigh a token
    of a short completion more than one of a long completion, and change with how the step was cut.
    """
    total_tokens = sum(map(len, completion_ids))
    loss = 0.0
    for start in range(0, len(prompt_ids), micro_batch):
        part = slice(start, start + micro_batch)
        batch = make_batch(prompt_ids[part], completion_ids[part], pad)
        divergence, _ = reverse_kl_sum(student, teacher, *batch)
        (divergence / total_tokens).backward()
        loss += divergence.item() / total_tokens
    return loss


def read_prompts(path: str, tokenizer) -> list[list[int]]:
    """Token ids of the `prompt` column: text as it is, messages through the chat template."""
    with open(path, encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    texts = [
        p if isinstance(p, str) else tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    return [
        tokenizer(t, add_special_tokens=isinstance(p, str))["input_ids"] for t, p in zip(texts, prompts, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--student", default="runs/demo/sft")
    parser.add_argument("--teacher", default="runs/demo/teacher")
    parser.add_argument("--prompts", default="runs/demo/data/prompts.jsonl")
    parser.add_argument("--output_dir", default="runs/opd_loop")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32, help="prompts a step")
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--max_new_tokens", type=int, default=25)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    student, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in (args.student, args.teacher))
    tokenizer = AutoTokenizer.from_pretrained(args.student)
    same = tokenizer.get_vocab() == AutoTokenizer.from_pretrained(args.teacher).get_vocab()
    assert same, "student and teacher must mean the same token by the same id: the divergence compares ids"
    teacher.eval().requires_grad_(False)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    declared = student.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])} - {None}

    prompts = read_prompts(args.prompts, tokenizer)
    random.Random(args.seed).shuffle(prompts)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.learning_rate, weight_decay=0.0)
    for step in range(args.steps):
        prompt_ids = [prompts[(step * args.batch + i) % len(prompts)] for i in range(args.batch)]
        completion_ids = sample(student, prompt_ids, stop, pad, args.max_new_tokens)
        loss = opd_step(student, teacher, prompt_ids, completion_ids, pad, args.micro_batch)
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        length = sum(map(len, completion_ids)) / len(completion_ids)
        print(f"step {step + 1:3d}  reverse KL {loss:.4f}  grad norm {norm:.3f}  completion length {length:.1f}")
    student.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
