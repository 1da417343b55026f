"""Supervised fine-tuning: the likelihood of transformers, in every layout, and resumable."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from ppo_case import config_of, read_metrics
from safetensors.torch import load_file
from warm_ranks import on_ranks

from megappo.data.prepare.tiny_model import write_tiny_model
from megappo.errors import Interrupted, UserError
from megappo.trainer import sft
from megappo.trainer.sft import run_sft

ROWS = [(f"{i % 10} + {i % 7} =", f"{i % 10 + i % 7}") for i in range(24)]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A YAML file beside its data and model: 24 examples, 6 steps of 8."""
    folder = tmp_path_factory.mktemp("sft")
    for name, rows in (("train", ROWS), ("val", ROWS[3:10])):
        lines = [json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    write_tiny_model(folder / "model", [" ".join(row) for row in ROWS], hidden=48, layers=2, heads=4)
    settings = {
        "trainer": {"output_dir": "out", "logger": ["jsonl"]},
        "model": {"path": "model"},
        "sft": {"train_files": ["train.jsonl"], "val_files": ["val.jsonl"], "batch_size": 8}
        | {"micro_batch_size_per_gpu": 3, "max_length": 16, "total_epochs": 2, "test_freq": 2, "save_freq": 4}
        | {"optim": {"lr": 1e-2, "lr_scheduler": "linear", "lr_warmup_ratio": 0.3}},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))
    return folder / "sft.yaml"


def config(yaml_file: Path, out: str, **changes):
    folder = yaml_file.parent / out
    places = {"trainer__output_dir": str(folder), "sft__export_path": str(folder / "model")}
    return config_of(yaml_file, dist.get_world_size(), kind="sft", **{**places, **changes})


def run_each(yaml_file: Path, cases: dict) -> None:
    for out, changes in cases.items():
        run_sft(config(yaml_file, out, **changes))


def reference_loss(folder: Path, rows) -> float:
    """transformers' mean negative log-likelihood of the response tokens (EOS included)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = count = 0
    for prompt, response in rows:
        head = tokenizer(prompt)["input_ids"]
        ids = torch.tensor([head + tokenizer(response)["input_ids"] + [tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(ids).logits.log_softmax(-1)[0, len(head) - 1 : -1]
        picked = logprobs.gather(1, ids[0, len(head) :, None])
        total, count = total - float(picked.sum()), count + len(picked)
    return total / count


@pytest.fixture(scope="module")
def alone(case):
    on_ranks(1, run_each, case, {"alone": {}})
    return case.parent / "alone"


def test_it_learns_and_reports_the_loss_of_transformers(case, alone):
    lines = read_metrics(alone)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert ["val/loss" in line for line in lines] == [False, True] * 3
    assert lines[-1]["val/loss"] < 0.7 * reference_loss(case.parent / "model", ROWS[3:10])
    exported = reference_loss(alone / "model", ROWS[3:10])
    assert lines[-1]["val/loss"] == pytest.approx(exported, rel=1e-4)
    assert lines[-1]["val/perplexity"] == pytest.approx(torch.tensor(exported).exp().item(), rel=1e-4)
    assert max(line["train/lr"] for line in lines) == pytest.approx(1e-2) and lines[-1]["train/lr"] < 5e-3
    assert all(line["perf/throughput"] > 0 and line["timing_s/step"] > 0 for line in lines)


def same_but_for_time(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/", "sync/seconds"))}


def interrupt_after(yaml_file: Path, out: str, step: int, changes: dict) -> tuple[str, int] | None:
    """Ask rank 0 to stop while it works on `step` (1-based)."""
    real = sft._Sft._train_step

    def train_step(self):
        if self.step == step - 1 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self)

    sft._Sft._train_step = train_step
    try:
        run_sft(config(yaml_file, out, **changes))
    except Interrupted as stopped:
        return str(stopped), stopped.code
    finally:
        sft._Sft._train_step = real
    return None


def check_resumed(case: Path, world: int, straight: Path, changes: dict) -> None:
    out = f"resumed_{world}"
    message, code = on_ranks(world, interrupt_after, case, out, 3, changes)
    assert code == 130 and "interrupted after step 3; the newest checkpoint is" in message
    assert not (case.parent / out / "model").exists()
    on_ranks(world, run_each, case, {out: changes})
    lines, again = read_metrics(straight), read_metrics(case.parent / out)
    assert [same_but_for_time(line) for line in again] == [same_but_for_time(line) for line in lines]
    weights = load_file(straight / "model/model.safetensors")
    others = load_file(case.parent / out / "model/model.safetensors")
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_one_process_resumes_bit_equal(case, alone):
    check_resumed(case, 1, alone, {})


def told(yaml_file: Path, out: str, changes: dict) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            run_sft(config(yaml_file, out, **changes))
        except UserError as err:
            return f"error: {err}"
    return text.getvalue()


def test_an_interrupt_without_checkpoints_says_so(case):
    message, _ = on_ranks(1, interrupt_after, case, "unsaved", 2, {"sft__save_freq": -1})
    assert "interrupted after step 2; nothing is saved (sft.save_freq is -1" in message
    assert not (case.parent / "unsaved/checkpoints").exists()


def test_a_new_run_keeps_earlier_checkpoints_apart(case):
    once = {"sft__total_steps": 1, "sft__save_freq": 1}
    on_ranks(1, told, case, "anew", once)
    text = on_ranks(1, told, case, "anew", {"trainer__resume": "never", **once})
    folder = case.parent / "anew"
    assert f"the earlier checkpoints are now in {folder / 'checkpoints.1'}" in text and "resumed after" not in text
    assert [p.name for p in (folder / "checkpoints").glob("iter_*")] == ["iter_000001"]


def test_a_run_that_keeps_nothing_is_warned_about(case):
    nothing = {"sft__export_path": None, "sft__save_freq": -1, "sft__total_steps": 1}
    text = on_ranks(1, told, case, "nothing", nothing)
    assert "warning: the fine-tuned model is kept nowhere: set sft.export_path or save_freq" in text
    assert "warning" not in on_ranks(1, told, case, "something", {**nothing, "sft__save_freq": 1})


def test_what_does_not_fit_is_reported_or_refused(case):
    text = on_ranks(1, told, case, "cut", {"sft__max_length": 5, "sft__total_steps": 1})
    assert "sft.train_files: 24 of 24 examples kept, longest 7 tokens" in text and "cut at 5 tokens" in text
    text = on_ranks(1, told, case, "few", {"sft__batch_size": 25})
    assert text.startswith("error: sft.batch_size is 25 but sft.train_files hold 24 examples")
    assert not (case.parent / "few").exists()


TP2 = {"sft__parallel__tensor_model_parallel_size": 2}
LAYOUTS = {
    "tp2_sp": TP2 | {"sft__parallel__sequence_parallel": True},
    "pp2": {"sft__parallel__pipeline_model_parallel_size": 2},
    "dp2_packed": {"sft__use_dynamic_bsz": True, "sft__max_token_len_per_gpu": 20},
}


def test_every_layout_learns_the_same(case, alone):
    on_ranks(2, run_each, case, LAYOUTS)
    for name in LAYOUTS:
        for line, expected in zip(read_metrics(case.parent / name), read_metrics(alone), strict=True):
            assert same_but_for_time(line) == pytest.approx(same_but_for_time(expected), rel=1e-4, abs=1e-6), name


def test_two_ranks_resume_bit_equal(case):
    on_ranks(2, run_each, case, {"straight_2": TP2})
    check_resumed(case, 2, case.parent / "straight_2", TP2)
