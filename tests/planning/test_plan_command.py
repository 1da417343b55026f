"""`megappo plan`: verdicts, remedies, search, and that its reading of a model agrees with the engine's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.config.load import read_config
from megappo.models.spec import load_spec
from megappo.observe.failures import run_app
from megappo.planning.cost import Machine, bubble_share, iteration_seconds, phase_times, token_flops
from megappo.planning.hardware import CARDS, Assumptions
from megappo.planning.parameters import active_parameters
from megappo.planning.plan import changed, make_plan, search, smallest_change
from megappo.planning.roles import job_of
from megappo.planning.shape import PUBLISHED, published_shape, read_shape
from megappo_cli.main import app

ROOT = Path(__file__).parents[2]
H100 = CARDS["h100-80g"]


def config_of(name: str, *changes: str):
    return read_config(ROOT / "yaml_configs" / f"{name}.yaml", changes)[0]


def shapes_of(model: str):
    shape = published_shape(model)
    return lambda path: shape


def run(capsys, *argv: str) -> tuple[int, str]:
    code = run_app(app, ["plan", *argv])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_is_what_the_engine_reads(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    spec, shape = load_spec(tmp_path), read_shape(tmp_path)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.ffn_size) == (
        shape.layers,
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.ffn,
    )
    flags = (spec.vocab_size, spec.tied_embeddings, spec.qkv_bias, spec.qk_norm)
    assert flags == (shape.vocabulary, shape.tied, shape.qkv_bias, shape.qk_norm)
    moe = spec.moe and (spec.moe.num_experts, spec.moe.top_k, spec.moe.ffn_size)
    assert moe == ((shape.experts, shape.top_k, shape.expert_ffn) if shape.experts else None)


def test_the_70b_example_is_refused_for_the_engines_copy(capsys):
    file = str(ROOT / "yaml_configs/llama3_70b.yaml")
    code, text = run(capsys, file, "--model", "llama3-70b", "--nodes", "8")
    assert code == 4
    assert "does not fit: gen needs" in text and "the largest part is engine weights" in text
    assert "no layout helps: the embedded rollout engine keeps the whole policy (131.4 GiB)" in text
    code, text = run(capsys, file, "rollout.engine=recorded", "--model", "llama3-70b", "--nodes", "8", "--json")
    data = json.loads(text)
    assert code == 0 and data["fits"] and "first_misfit" not in data
    assert sum(len(rank["ranks"]) for rank in data["ranks"]) == 64


def test_smallest_change_makes_it_fit():
    config = config_of("qwen2.5_7b_gsm8k", "actor.parallel.recompute=null", "actor.parallel.offload=none")
    machine, shapes = Machine(CARDS["a100-40g"], 1, 8), shapes_of("qwen2.5-7b")
    assert not make_plan(config, machine, shapes).fits
    remedy = smallest_change(config, machine, shapes)
    assert remedy is not None and 1 <= len(remedy.changes) <= 4
    if remedy.nodes == 1:
        assert make_plan(changed(config, remedy.changes), machine, shapes).fits


def test_search_ranks_what_fits():
    config = config_of("llama3_8b_dapo_style")
    found = search(config, Machine(H100, 1, 8), shapes_of("llama3-8b"), most=5)
    assert found and all(candidate.plan.fits for candidate in found)
    seconds = [candidate.plan.seconds for candidate in found]
    assert seconds == sorted(seconds)


def test_a_change_of_the_actors_layout_is_inherited_only_where_it_was():
    config = config_of("llama3_70b", "reference.parallel.tensor_model_parallel_size=4")
    out = changed(config, {"actor.parallel.tensor_model_parallel_size": 2})
    assert out.critic.parallel.tensor_model_parallel_size == 2
    assert out.critic.parallel.expert_tensor_parallel_size == 2
    assert out.reference.parallel.tensor_model_parallel_size == 4
    assert config.actor.parallel.tensor_model_parallel_size == 8


def phases(config, machine, model):
    plan = make_plan(config, machine, shapes_of(model))
    return {phase.name: phase for phase in plan.ranks[0].phases}


def test_offload_frees_idle_roles_and_only_those():
    machine = Machine(H100, 1, 8)
    kept = phases(config_of("qwen2.5_7b_gsm8k", "actor.parallel.offload=none"), machine, "qwen2.5-7b")
    some = phases(config_of("qwen2.5_7b_gsm8k", "actor.parallel.offload=optimizer"), machine, "qwen2.5-7b")
    gone = phases(config_of("qwen2.5_7b_gsm8k", "actor.parallel.offload=all"), machine, "qwen2.5-7b")
    assert kept["gen"].parts["actor"] > some["gen"].parts["actor"] > 0
    assert "actor" not in gone["gen"].parts
    assert kept["update_actor"].parts["actor"] == gone["update_actor"].parts["actor"]


def test_full_recomputation_trades_memory_for_time():
    machine, shapes = Machine(H100, 1, 8), shapes_of("qwen2.5-7b")
    plain, full = (
        make_plan(config_of("qwen2.5_7b_gsm8k", f"actor.parallel.recompute={value}"), machine, shapes)
        for value in ("null", "full")
    )
    part = [{p.name: p for p in plan.ranks[0].phases}["update_actor"].parts["activations"] for plan in (plain, full)]
    assert part[0] > 2 * part[1]
    assert full.seconds > plain.seconds


def test_roles_on_ranks_of_their_own_update_at_the_same_time():
    shapes, machine = shapes_of("qwen2.5-0.5b"), Machine(H100, 1, 8)
    changes = ["actor.parallel={num_ranks: 4}", "critic.parallel={first_rank: 4, num_ranks: 4}"]
    job = job_of(config_of("qwen2.5_0.5b_gsm8k", *changes), 8, shapes)
    times = phase_times(job, machine)
    updates = [time.seconds for time in times if time.name.startswith("update_")]
    assert iteration_seconds(job, times) == pytest.approx(sum(t.seconds for t in times) - min(updates))


def test_bubble_and_flops_follow_the_textbook():
    config = config_of("llama3_70b")
    actor = job_of(config, 64, shapes_of("llama3-70b")).role("actor")
    assert bubble_share(actor, 8) == pytest.approx(3 / (2 * 8 + 3))
    shape = published_shape("llama3-70b")
    assert token_flops(shape, 0) == 2 * active_parameters(shape)
    assert active_parameters(published_shape("qwen3-30b-a3b")) == pytest.approx(3.0e9, rel=0.05)  # "A3B"


def test_a_wider_span_uses_the_network():
    machine = Machine(H100, 2, 8, Assumptions(links=1.0))
    assert machine.link(8) == H100.nvlink and machine.link(16) == H100.network


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "tpu"], "--gpu tpu: not in the table"),
        (["--model", "gpt-5"], "--model gpt-5: not in the table"),
        (["--model", "llama3-70b", "--nodes", "3"], "do not divide the 24"),
        ([], "config.json: cannot be read"),
    ],
)
def test_mistakes_are_named(words, message, capsys):
    assert run_app(app, ["plan", str(ROOT / "yaml_configs/llama3_70b.yaml"), *words]) == 2
    assert message in capsys.readouterr().err
