"""Every kind of teacher against the plain formula; what the student trains is never changed by a switch."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from plain import gradients_of, mean_over_tokens
from test_distillation_trainer import build, gradients
from test_objective_wiring import COPIED, ON_HEAD, OURS, log_pq, pair, rows_of, seeded_peft
from tiny import llama, qwen3, tokenizer
from training import assert_same_gradients, text_rows
from transformers import Qwen3ForCausalLM

import trl_opd.losses as losses
from trl_opd import DistillationConfig

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


def reverse(student, teacher):
    return mean_over_tokens(rows_of(), lambda p, c: losses.reverse_kl(*log_pq(student, teacher, p, c)))


def saved(model, folder, **tokens):
    model.save_pretrained(folder)
    tokenizer(**tokens).save_pretrained(folder)
    return str(folder)


# --- base and adapter ------------------------------------------------------------------------------------------------


CHECKPOINTED = pytest.mark.feature("`gradient_checkpointing` with the base as teacher", job="distill", model="lora")


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=CHECKPOINTED)])
@pytest.mark.parametrize("config", [LORA, ON_HEAD, COPIED], ids=["body", "LoRA on the head", "copied head"])
def test_base_teacher_is_the_student_without_its_adapter(tmp_path, config, checkpointing):
    student = seeded_peft(llama(), config)
    options = {"teacher_kind": "base", "gradient_checkpointing": checkpointing}
    ours, log = gradients(*OURS, tmp_path, student=student, teacher=False, **options)
    reference = seeded_peft(llama(), config)
    loss = reverse(reference, llama())
    assert loss > 1e-3 and log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(ours, gradients_of(loss, reference), rtol=1e-4)


def test_adapter_teacher_is_a_second_adapter_on_the_same_base(tmp_path):
    folder = saved(seeded_peft(qwen3(), LORA, seed=5), tmp_path / "adapter")
    student = seeded_peft(qwen3(), LORA)
    options = {"teacher_kind": "adapter", "teacher_model_name_or_path": folder}
    ours, log = gradients(*OURS, tmp_path, student=student, teacher=False, **options)
    reference = seeded_peft(qwen3(), LORA)
    loss = reverse(reference, PeftModel.from_pretrained(qwen3(), folder))
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert not any("teacher" in name for name in ours)
    assert_same_gradients(ours, gradients_of(loss, reference), rtol=1e-4)


@pytest.mark.parametrize("kind", ["base", "adapter"])
def test_a_switch_changes_nothing_that_trains_and_no_teacher_is_saved(tmp_path, kind):
    folder = saved(seeded_peft(qwen3(), LORA, seed=5), tmp_path / "adapter")
    options = {"teacher_kind": kind} | ({"teacher_model_name_or_path": folder} if kind == "adapter" else {})
    trainer, _ = build(
        *OURS, tmp_path / "out", student=seeded_peft(qwen3(), LORA), teacher=False, max_steps=2, **options
    )
    trains = lambda: {name for name, p in trainer.model.named_parameters() if p.requires_grad}  # noqa: E731
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if n not in trains()}
    before = trains()
    trainer.train()
    assert trains() == before and all("default" in name for name in before)
    assert trainer.model.active_adapters == ["default"] and trainer.model.training
    for name, weight in trainer.model.named_parameters():
        if name in frozen:
            assert torch.equal(weight, frozen[name]), name
    trainer.save_model(str(tmp_path / "saved"))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert "adapter_model.safetensors" in names and "teacher" not in names


def test_an_error_in_the_teachers_pass_leaves_the_student_as_it_was():
    from trl_opd.teachers.adapter import switched

    model = seeded_peft(qwen3(), LORA).train()
    trains = [p.requires_grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match="broken"), switched(model, None):
        assert not model.training
        raise RuntimeError("broken")
    assert [p.requires_grad for p in model.parameters()] == trains and model.training
    x = torch.tensor([[5, 6, 7]])
    assert not torch.equal(model(x).logits, qwen3()(x).logits)  # the adapter is on again


def test_base_teacher_holds_one_copy_of_the_weights(tmp_path):
    student = seeded_peft(qwen3(), LORA)
    size = sum(p.numel() for p in student.parameters())
    trainer, _ = build(*OURS, tmp_path, student=student, teacher=False, teacher_kind="base")
    held = {id(p): p.numel() for m in (trainer.model, trainer.teacher_model) if m is not None for p in m.parameters()}
    assert sum(held.values()) == size


# --- a teacher's own weights -----------------------------------------------------------------------------------------


def test_a_teacher_that_is_an_adapter_folder_is_loaded_on_its_base(tmp_path):
    base = saved(qwen3(seed=1), tmp_path / "base")
    tuned = seeded_peft(Qwen3ForCausalLM.from_pretrained(base), LORA, seed=5)
    tuned.peft_config["default"].base_model_name_or_path = base
    folder = saved(tuned, tmp_path / "adapter")
    ours, log = gradients(*OURS, tmp_path, teacher=folder)
    student, teacher = pair(teacher=tuned)
    loss = reverse(student, teacher)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_teacher_scores_near_its_own_weights(tmp_path, bits):
    # large enough for layers that bitsandbytes quantises in blocks of 64
    teacher = qwen3(seed=1, hidden=64, initializer_range=0.05)
    folder = saved(teacher, tmp_path / "teacher")
    _, log = gradients(*OURS, tmp_path, teacher=folder, **{f"teacher_load_in_{bits}bit": True})
    student, exact = pair(teacher=teacher)
    assert log["loss"] == pytest.approx(reverse(student, exact).item(), rel=0.05)
    trainer, _ = build(*OURS, tmp_path, teacher=folder, **{f"teacher_load_in_{bits}bit": True})
    assert any(type(m).__name__.startswith(f"Linear{bits}bit") for m in trainer.teacher_model.modules())


@pytest.mark.feature("QLoRA", job="distill", model="lora")
def test_a_4bit_student_has_right_gradients_after_a_rollout_and_an_evaluation(tmp_path):
    """Its first forward in eval mode would repack the weights into a kernel without backward."""
    from transformers import BitsAndBytesConfig

    folder = saved(qwen3(hidden=64), tmp_path / "student")
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)

    def student():
        model = Qwen3ForCausalLM.from_pretrained(folder, quantization_config=quantised)
        torch.manual_seed(7)
        return get_peft_model(model, LORA)

    steps = []
    for warm in (False, True):
        trainer, recorder = build(*OURS, tmp_path, student=student(), teacher=qwen3(seed=1, hidden=64))
        if warm:
            trainer.model.eval()
            with torch.no_grad():
                trainer.model(torch.tensor([[5, 6, 7]]))
            trainer.model.train()
            trainer.evaluate(text_rows(2))
        trainer.train()
        steps.append(recorder.steps[0])
    assert_same_gradients(steps[1], steps[0], rtol=1e-5)
    # and those of the very weights it holds, in full precision
    torch.manual_seed(7)
    dense = get_peft_model(
        Qwen3ForCausalLM.from_pretrained(folder, quantization_config=quantised).dequantize().float(), LORA
    )
    with torch.no_grad():  # TRL keeps the adapter of a quantised student in bfloat16
        for parameter in dense.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.bfloat16())
    loss = reverse(dense, qwen3(seed=1, hidden=64))
    ours = {name: gradient.float() for name, gradient in steps[0].items()}
    for name, gradient in gradients_of(loss, dense).items():
        assert torch.cosine_similarity(ours[name].flatten(), gradient.flatten(), dim=0) > 0.999, name


# --- a privileged prompt ---------------------------------------------------------------------------------------------


def test_a_privileged_prompt_is_seen_by_the_teacher_alone_on_the_same_tokens(tmp_path):
    """The teacher is shown prompts of other lengths: its logits for token t of a completion meet the student's for
    it."""
    rows = text_rows(4).map(lambda row, i: {"hint": "The answer is " + row["completion"] + "! " * i}, with_indices=True)
    rows = rows.remove_columns("completion")
    ours, log = gradients(*OURS, tmp_path, rows=rows, teacher_prompt_column="hint")
    student, teacher = pair()
    tok = tokenizer()
    hints = {tuple(tok(row["prompt"])["input_ids"]): tok(row["hint"])["input_ids"] for row in rows}

    def per_token(prompt, completion):
        log_p, _ = log_pq(student, teacher, prompt, completion)
        _, log_q = log_pq(student, teacher, hints[tuple(prompt)], completion)
        return losses.reverse_kl(log_p, log_q)

    loss = mean_over_tokens(rows_of(), per_token)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 4])
def test_evaluation_on_completions_shows_the_teacher_its_own_prompt(tmp_path, batch):
    rows = text_rows(4).map(lambda row: {"hint": "psst " + row["prompt"]})
    options = {"teacher_prompt_column": "hint", "per_device_eval_batch_size": batch}
    trainer, _ = build(*OURS, tmp_path, rows=rows, eval_rows=rows, **options)
    (student, teacher), tok = pair(), tokenizer()

    def per_token(prompt, completion):
        hint = tok("psst " + tok.decode(prompt))["input_ids"]
        log_p, _ = log_pq(student, teacher, prompt, completion)
        return losses.reverse_kl(log_p, log_pq(student, teacher, hint, completion)[1])

    expected = mean_over_tokens(rows_of(), per_token).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_a_privileged_prompt_with_the_base_as_teacher(tmp_path):
    rows = text_rows(4).map(lambda row: {"hint": "psst " + row["prompt"]}).remove_columns("completion")
    options = {"teacher_prompt_column": "hint", "teacher_kind": "base"}
    _, log = gradients(*OURS, tmp_path, student=seeded_peft(qwen3(), LORA), teacher=False, rows=rows, **options)
    student, tok = seeded_peft(qwen3(), LORA), tokenizer()

    def per_token(prompt, completion):
        hint = tok("psst " + tok.decode(prompt))["input_ids"]
        log_p, _ = log_pq(student, qwen3(), prompt, completion)
        return losses.reverse_kl(log_p, log_pq(student, qwen3(), hint, completion)[1])

    assert log["loss"] == pytest.approx(mean_over_tokens(rows_of(), per_token).item(), rel=1e-4)


def test_a_privileged_prompt_with_the_students_own_checkpoint_as_teacher(tmp_path):
    """Loaded twice and only told apart by what it is shown, it is a teacher; without that it is refused."""
    folder = saved(qwen3(), tmp_path / "student")
    rows = text_rows(4).map(lambda row: {"hint": "psst " + row["prompt"]}).remove_columns("completion")
    options = {"student": folder, "teacher": folder, "rows": rows}
    _, log = gradients(*OURS, tmp_path, **options, teacher_prompt_column="hint")
    assert log["loss"] > 1e-3
    with pytest.raises(ValueError, match=r"Student and teacher are both .*`teacher_prompt_column`"):
        build(*OURS, tmp_path, **options)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"teacher_kind": "base"}, "`teacher_kind: base` switches the adapter.*`use_peft: true`"),
        ({"teacher_kind": "adapter"}, "`teacher_kind: adapter` switches the adapter"),
        ({"teacher_prompt_column": "hint"}, "`teacher_prompt_column: hint` is not in the train dataset"),
        ({"teacher_load_in_4bit": True}, "the teacher given is a model already"),
    ],
)
def test_refusals_say_what_to_set(tmp_path, options, message):
    teacher = False if "teacher_kind" in options else None
    with pytest.raises(ValueError, match=message):
        build(*OURS, tmp_path, teacher=teacher, **options)


def test_base_with_another_model_named_is_refused(tmp_path):
    options = {"teacher_kind": "base", "teacher_model_name_or_path": str(tmp_path)}
    with pytest.raises(ValueError, match="Leave one of them out"):
        build(*OURS, tmp_path, student=seeded_peft(qwen3(), LORA), teacher=False, **options)
    options = {"teacher_kind": "adapter", "teacher_model_name_or_path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        build(*OURS, tmp_path, student=seeded_peft(qwen3(), LORA), teacher=False, **options)


def test_kinds_are_named_where_one_is_unknown(tmp_path):
    with pytest.raises(ValueError, match="must be one of model, base, adapter"):
        DistillationConfig(str(tmp_path), teacher_kind="oracle")
