"""A run that was interrupted and continued equals one that was not: losses, weights, schedules, data, KL."""

from __future__ import annotations

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ppo_case import config_of, read_metrics, write_case
from safetensors.torch import load_file
from support import make_hf_model
from warm_ranks import on_ranks

from megappo.errors import Interrupted, UserError
from megappo.trainer import phases
from megappo.trainer.ppo import run_ppo

TP2 = {"actor__parallel__tensor_model_parallel_size": 2}
PP2 = {"actor__parallel__pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "actor__parallel__virtual_pipeline_model_parallel_size": 2}
BASE = {
    "trainer__total_iterations": 4,
    "trainer__save_freq": 3,
    "actor__ppo_epochs": 1,
    "actor__optim__lr_scheduler": "cosine",
    "actor__optim__lr_warmup_steps": 3,
    "critic__optim__lr_scheduler": "linear",
    "algorithm__kl_ctrl__horizon": 20,
    "algorithm__adv_estimator": "gae",
}
BF16 = {"model__dtype": "bf16"}
PLAIN = {"actor__parallel__use_distributed_optimizer": False}
ONE_RANK = {"one": {}, "one_bf16": BF16, "one_plain_bf16": {**BF16, **PLAIN}}
APART = {  # no rank holds both: each is a bystander when the other's checkpoint is written and read
    "actor__parallel": {"num_ranks": 1},
    "critic__parallel": {"first_rank": 1, "num_ranks": 1},
}
TWO_RANKS = {"tp2_bf16": {**TP2, **BF16}, "dp2": {}, "pp2_vpp2": VPP2, "apart": APART}


def settings(yaml_file, out: str, **changes):
    folder = yaml_file.parent / out
    places = {"trainer__output_dir": str(folder), "rollout__record_dir": str(folder / "rollouts")}
    return config_of(yaml_file, dist.get_world_size(), **{**BASE, **places, **changes})


def interrupt_in_iteration(number: int, config) -> Interrupted:
    """Run until the last rank alone is asked to stop, while it generates for iteration `number` (1-based)."""
    real = phases.generate

    def generate(run):
        if run.iteration == number - 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run)

    phases.generate = generate
    try:
        run_ppo(config)
    except Interrupted as stopped:
        return stopped
    finally:
        phases.generate = real
    raise AssertionError("the run was not interrupted")


def straight_and_resumed(yaml_file, cases: dict) -> None:
    for name, changes in cases.items():
        run_ppo(settings(yaml_file, f"{name}_straight", **changes))
        resumed = settings(yaml_file, f"{name}_resumed", **changes)
        stopped = interrupt_in_iteration(2, resumed)
        assert "after iteration 2" in str(stopped) and "iter_000002" in str(stopped), stopped
        run_ppo(resumed)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case(tmp_path_factory.mktemp("resume"))


def same_but_for_time(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("timing_s/", "perf/", "sync/seconds"))}


def checkpoint_state(folder) -> dict:
    state = json.loads((folder / "checkpoints/iter_000004/state.json").read_text())
    return {key: state[key] for key in ("iteration", "optimizers", "kl_controller", "weight_version")}


def check_bit_equal(case, names) -> None:
    for name in names:
        straight, resumed = case.parent / f"{name}_straight", case.parent / f"{name}_resumed"
        lines, again = read_metrics(straight), read_metrics(resumed)
        assert [line["step"] for line in again] == [1, 2, 3, 4]
        for line, other in zip(lines, again, strict=True):
            assert same_but_for_time(line) == same_but_for_time(other), name
        for iteration in range(4):  # prompts, seeds, sampled tokens and their log-probs
            file = f"rollouts/rollouts_{iteration:06d}.jsonl"
            assert (straight / file).read_text() == (resumed / file).read_text(), (name, iteration)
        weights, others = (load_file(folder / "final_hf/model.safetensors") for folder in (straight, resumed))
        assert all(torch.equal(weights[key], others[key]) for key in weights), name
        assert checkpoint_state(straight) == checkpoint_state(resumed)
        # What was restored had moved: a coefficient or a schedule that starts anew would show above.
        assert len({line["actor/reward_kl_penalty_coeff"] for line in lines}) == 4
        assert lines[2]["actor/lr"] < lines[1]["actor/lr"] and lines[2]["critic/lr"] < lines[1]["critic/lr"]
        assert abs(lines[2]["actor/reward_kl_penalty"]) > 0.005  # against the first policy, not the resumed one


def test_two_ranks_resume_bit_equal(case):
    on_ranks(2, straight_and_resumed, case, TWO_RANKS)
    check_bit_equal(case, TWO_RANKS)


def resume_copy(yaml_file, name: str, changes: dict) -> None:
    """Continue a copy of the run that two tensor-parallel ranks have begun."""
    if dist.get_rank() == 0:
        shutil.copytree(yaml_file.parent / "by_tp2", yaml_file.parent / name)
    dist.barrier()
    run_ppo(settings(yaml_file, name, **changes))


def begin_and_change_layout(yaml_file) -> None:
    interrupt_in_iteration(2, settings(yaml_file, "by_tp2", **TP2))
    resume_copy(yaml_file, "then_pp2", PP2)
    resume_copy(yaml_file, "then_dp2", {})


def continue_alone(yaml_file) -> None:
    run_ppo(settings(yaml_file, "alone"))
    resume_copy(yaml_file, "then_alone", {})


def test_another_layout_continues_the_run(case):
    """Saved by two tensor-parallel ranks; continued by two pipeline stages, by two replicas and by one process."""
    on_ranks(2, begin_and_change_layout, case)
    on_ranks(1, continue_alone, case)
    want = read_metrics(case.parent / "alone")
    for name in ("then_pp2", "then_dp2", "then_alone"):
        got = read_metrics(case.parent / name)
        for line, expected in zip(got, want, strict=True):
            for key, value in expected.items():
                if not key.startswith(("timing_s/", "perf/", "sync/seconds")):
                    assert line[key] == pytest.approx(value, rel=1e-4, abs=2e-6), (name, line["step"], key)


EP2 = {"actor__parallel__expert_model_parallel_size": 2}


def mixture(yaml_file) -> dict:
    """A mixture of experts with the case's tokenizer, beside its model, as a setting."""
    model, moe = yaml_file.parent / "model", yaml_file.parent / "moe"
    if not moe.exists():
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        make_hf_model(moe, "qwen3_moe", vocab_size=vocabulary, num_hidden_layers=2)
        for file in model.glob("*token*"):
            shutil.copy(file, moe)
    return {"model__path": str(moe), "trainer__save_freq": 1}


def begin(yaml_file, name: str, changes: dict) -> None:
    run_ppo(settings(yaml_file, name, **changes))


def resume_from(yaml_file, source: str, name: str, changes: dict) -> None:
    """Continue a copy of the run `source`, which has done two iterations."""
    if dist.get_rank() == 0:
        shutil.copytree(yaml_file.parent / source, yaml_file.parent / name)
    dist.barrier()
    run_ppo(settings(yaml_file, name, **changes, trainer__total_iterations=3))


def test_experts_may_be_shared_out_differently_after_a_resume(case):
    """megatron gives experts an optimizer of their own only where expert parallelism is on."""
    base = mixture(case)
    two = {**base, "trainer__total_iterations": 2}
    on_ranks(1, begin, case, "moe_alone", two)
    on_ranks(2, resume_from, case, "moe_alone", "moe_then_ep2", {**base, **EP2})
    on_ranks(2, begin, case, "moe_ep2", {**two, **EP2})
    on_ranks(1, resume_from, case, "moe_ep2", "moe_then_alone", base)
    on_ranks(1, resume_from, case, "moe_alone", "moe_straight", base)
    straight, *others = (read_metrics(case.parent / f"moe_{n}")[2] for n in ("straight", "then_ep2", "then_alone"))
    for other in others:
        for key in ("actor/grad_norm", "actor/kl_loss", "actor/entropy", "critic/vf_loss", "actor/lr"):
            assert other[key] == pytest.approx(straight[key], rel=1e-4), key


def test_one_process_resumes_bit_equal(case):
    on_ranks(1, straight_and_resumed, case, ONE_RANK)
    check_bit_equal(case, ONE_RANK)


def interrupted_before_it_began(yaml_file) -> str:
    """Stopped while the first evaluation runs: not even one iteration is done."""
    from megappo.trainer import ppo

    real = ppo.evaluate

    def evaluate(run):
        os.kill(os.getpid(), signal.SIGINT)
        return real(run)

    ppo.evaluate = evaluate
    changes = {"trainer__val_before_train": True, "data__val_files": [str(yaml_file.parent / "val.jsonl")]}
    try:
        run_ppo(settings(yaml_file, "at_once", **changes))
    except Interrupted as stopped:
        return str(stopped)
    finally:
        ppo.evaluate = real
    return ""


def without_saving(yaml_file) -> str:
    stopped = interrupt_in_iteration(1, settings(yaml_file, "unsaved", trainer__save_freq=-1))
    assert stopped.code == 128 + signal.SIGTERM
    return str(stopped)


def test_an_interrupt_tells_when_nothing_is_saved(case):
    assert "interrupted after iteration 0; nothing is saved" in on_ranks(1, interrupted_before_it_began, case)
    message = on_ranks(1, without_saving, case)
    assert "interrupted after iteration 1; nothing is saved (trainer.save_freq is -1" in message
    for out in ("at_once", "unsaved"):
        assert not (case.parent / out / "checkpoints").exists() and not (case.parent / out / "final_hf").exists()


# --- master weights, settings, other roles ---------------------------------------------------------------


def load_then_step(yaml_file) -> None:
    """bf16 with fp32 masters: a step of learning rate ~0 must leave what was loaded, not what was there before."""
    from megappo.checkpoint.hf import HFReader
    from megappo.data.batch import Placement
    from megappo.data.sft_rows import SftRow
    from megappo.engine.losses import NLLLoss
    from megappo.trainer.setup import build_engine
    from megappo.trainer.sft import row_batch

    config = config_of(yaml_file, model__dtype="bf16", actor__optim__lr=1e-12)
    for distributed in (True, False):
        parallel = config.actor.parallel.model_copy(update={"use_distributed_optimizer": distributed})
        engine = build_engine(config.model.path, parallel, config.model, optim=config.actor.optim)
        with torch.no_grad():
            for chunk in engine.chunks:
                for param in chunk.parameters():
                    param.add_(1.0)
        engine.sync_master_weights()
        engine.load_hf(HFReader(config.model.path))
        want = {name: tensor.clone() for name, tensor in engine.stream_weights(torch.float32)}
        batch = row_batch([SftRow(0, [3, 4], [5, 6, 1])], Placement(engine.layout, np.zeros(1, dtype=np.int64)), 0)
        step = engine.train_step(batch, np.array([0]), [[0]], NLLLoss(), agg_mode="token-mean")
        assert step.applied and step.grad_norm > 0
        for name, tensor in engine.stream_weights(torch.float32):
            assert torch.equal(tensor, want[name]), (distributed, name)


def test_master_weights_follow_loaded_weights(case):
    on_ranks(1, load_then_step, case)


def told(yaml_file, out: str, changes: dict) -> str:
    """Standard error of a run."""
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            run_ppo(settings(yaml_file, out, **changes))
        except UserError as err:
            return f"error: {err}"
    return text.getvalue()


def test_changed_settings_are_told_on_resume(case):
    two = {"trainer__total_iterations": 2, "trainer__save_freq": 2}
    assert "resumed" not in on_ranks(1, told, case, "changed", two)
    text = on_ranks(1, told, case, "changed", {"actor__clip_ratio": 0.1, "actor__optim__lr": 1e-5})
    assert "resumed after iteration 2" in text
    line = next(line for line in text.splitlines() if line.startswith("changed since the checkpoint: "))
    assert line.split(": ", 1)[1].split("; ") == [
        "actor.optim.lr: 0.001 -> 1e-05",
        "actor.clip_ratio: 0.2 -> 0.1",
        "actor.clip_ratio_low: 0.2 -> 0.1",
        "actor.clip_ratio_high: 0.2 -> 0.1",
    ]
    lines = read_metrics(case.parent / "changed")
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[2]["actor/lr"] < 1e-5


def test_a_finished_run_only_exports_again(case):
    text = on_ranks(1, told, case, "changed", {})
    assert "resumed after iteration 4" in text and "trained model" in text
    assert [line["step"] for line in read_metrics(case.parent / "changed")] == [1, 2, 3, 4]


def test_checkpoints_of_other_roles_or_models_are_refused(case, tmp_path):
    text = on_ranks(1, told, case, "changed", {"algorithm__adv_estimator": "grpo"})
    assert text.startswith("error: ") and "holds actor, critic, this run trains actor" in text
    other = write_case(tmp_path / "other", layers=2)
    text = on_ranks(1, told, case, "changed", {"model__path": str(other.parent / "model")})
    assert text.startswith("error: ") and "iter_000004" in text and text.count("\n") == 0, text


def test_a_new_run_in_the_same_folder_keeps_the_old_checkpoints_apart(case):
    settings = {"trainer__resume": "never", "trainer__save_freq": 1, "trainer__total_iterations": 2}
    text = on_ranks(1, told, case, "changed", settings)
    folder = case.parent / "changed"
    assert "resumed" not in text and f"the earlier checkpoints are now in {folder / 'checkpoints.1'}" in text
    later = ["iter_000003", "iter_000004"]
    assert sorted(p.name for p in (folder / "checkpoints.1").iterdir()) == ["iter_000002", *later, "latest"]
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["iter_000001", "iter_000002", "latest"]
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]
    text = on_ranks(1, told, case, "changed", {"trainer__total_iterations": 3})
    assert "resumed after iteration 2" in text
