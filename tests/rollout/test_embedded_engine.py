import itertools
import random

import pytest
import torch
from support import tiny_hf_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from megappo.errors import UserError
from megappo.rollout import decode
from megappo.rollout.base import GenerateRequest, SamplingParams
from megappo.rollout.embedded import EmbeddedEngine

FAMILIES = ("llama", "llama3_rope", "qwen2", "qwen2_tied", "qwen3")
VOCAB = 131


def tiny_model(family: str = "qwen2", seed: int = 0, **changes):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_hf_config(family, **changes), dtype=torch.float32).eval()


def engine_for(model, *, max_batch_tokens: int = 4096, send: bool = True, **options) -> EmbeddedEngine:
    options = {"dtype": torch.float32, "device": "cpu", "pad_token_id": 0, **options}
    engine = EmbeddedEngine(model.config, max_batch_tokens=max_batch_tokens, **options)
    if send:
        engine.update_weights(model.state_dict().items(), 1)
    return engine


def requests_of(lengths: list[int], copies: int = 1, seed: int = 0) -> list[GenerateRequest]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]
    pairs = itertools.product(enumerate(prompts), range(copies))
    return [GenerateRequest(i, group, prompt, seed=1000 + i) for i, ((group, prompt), _) in enumerate(pairs)]


@torch.no_grad()
def forced_logprobs(model, sample, temperature: float) -> torch.Tensor:
    """Log-probs of the response by one forward over prompt and response, without a cache."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids], device=model.device)
    scaled = model(ids, use_cache=False).logits[0].float().cpu() / temperature
    n = len(sample.prompt_ids)
    return scaled.log_softmax(-1)[n - 1 : -1].gather(-1, ids[0, n:, None].cpu())[:, 0]


def assert_scored_right(model, samples, temperature: float) -> None:
    for sample in samples:
        want = forced_logprobs(model, sample, temperature)
        torch.testing.assert_close(torch.tensor(sample.logprobs), want, rtol=0, atol=1e-5)


MIXED = [5, 1, 12, 3, 3, 60, 1, 7]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family):
    model = tiny_model(family)
    samples = engine_for(model).generate(requests_of(MIXED), SamplingParams(10, temperature=0.0))
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, eos_token_id=-1
        )
        assert sample.response_ids == out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_teacher_forced_forward(family, temperature):
    model = tiny_model(family)
    samples = engine_for(model).generate(requests_of(MIXED, copies=2), SamplingParams(12, temperature))
    assert_scored_right(model, samples, temperature)


def test_greedy_logprobs_are_those_of_temperature_one():
    model = tiny_model()
    samples = engine_for(model).generate(requests_of(MIXED), SamplingParams(6, temperature=0.0))
    assert_scored_right(model, samples, 1.0)


def test_sliding_window_layers_attend_within_their_window():
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=2, layer_types=None)
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    samples = engine_for(model).generate(requests_of(MIXED), SamplingParams(12))
    assert_scored_right(model, samples, 1.0)


def test_experts_are_filled_one_by_one(tmp_path):
    from safetensors.torch import load_file

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, **heads, **experts, vocab_size=VOCAB, max_position_embeddings=128)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in weights
    engine = engine_for(model, send=False)
    engine.update_weights(weights.items(), 1)
    assert_scored_right(model, engine.generate(requests_of([4, 1, 9]), SamplingParams(5)), 1.0)


def test_samples_do_not_depend_on_batches_order_or_company(monkeypatch):
    model = tiny_model()
    requests = requests_of(MIXED, copies=3)
    sampling = SamplingParams(10, stop_token_ids=(5, 17, 40))
    want = engine_for(model).generate(requests, sampling)
    assert [s.sample_id for s in want] == [r.sample_id for r in requests]
    assert len({s.finish_reason for s in want}) == 2

    shuffled = random.Random(1).sample(requests, len(requests))
    got = engine_for(model).generate(shuffled, sampling)
    assert [s.sample_id for s in got] == [r.sample_id for r in shuffled]

    others = [got, engine_for(model, max_batch_tokens=70).generate(requests, sampling)]
    engine = engine_for(model, max_batch_tokens=150)
    others.append([engine.generate([r], sampling)[0] for r in requests])
    others.append(engine.generate(requests[:7], sampling) + engine.generate(requests[7:], sampling))
    monkeypatch.setattr(decode, "_PREFILL_TOKENS", 8)
    monkeypatch.setitem(decode._LOOK_EVERY, "cpu", 4)
    others.append(engine_for(model).generate(requests, sampling))
    for samples in others:
        for a, b in zip(want, sorted(samples, key=lambda s: s.sample_id), strict=True):
            assert (a.response_ids, a.finish_reason) == (b.response_ids, b.finish_reason)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_samples_of_a_group_differ_and_equal_seeds_agree():
    engine = engine_for(tiny_model())
    samples = engine.generate(requests_of([6], copies=8), SamplingParams(8))
    assert len({tuple(s.response_ids) for s in samples}) == 8
    twin = [GenerateRequest(i, 0, [4, 5], seed=3) for i in range(2)]
    first, second = engine.generate(twin, SamplingParams(8))
    assert first.response_ids == second.response_ids


def test_first_tokens_follow_the_models_distribution():
    model = tiny_model(initializer_range=0.3, vocab_size=16)
    requests = [GenerateRequest(i, 0, [3, 4, 5], seed=i) for i in range(8000)]
    samples = engine_for(model, max_batch_tokens=1 << 20).generate(requests, SamplingParams(1))
    observed = torch.bincount(torch.tensor([s.response_ids[0] for s in samples]), minlength=16).double()
    with torch.no_grad():
        expected = 8000 * model(torch.tensor([[3, 4, 5]])).logits[0, -1].double().softmax(-1)
    assert ((observed - expected) ** 2 / expected).sum() < 15 + 6 * 30**0.5


def test_a_stop_token_ends_the_response_and_belongs_to_it():
    model = tiny_model()
    engine, requests = engine_for(model), requests_of(MIXED, copies=8)
    free = engine.generate(requests, SamplingParams(20))
    assert {s.finish_reason for s in free} == {"length"} and {len(s.response_ids) for s in free} == {20}
    stops = (free[0].response_ids[0], free[1].response_ids[4], free[2].response_ids[19])
    stopped = engine.generate(requests, SamplingParams(20, stop_token_ids=stops))
    for full, cut in zip(free, stopped, strict=True):
        at = next((i for i, token in enumerate(full.response_ids) if token in stops), None)
        length = 20 if at is None else at + 1
        assert cut.response_ids == full.response_ids[:length]
        assert cut.logprobs == pytest.approx(full.logprobs[:length], abs=1e-5)
        assert cut.finish_reason == ("length" if at is None else "stop")
    assert len(stopped[0].response_ids) == 1


def test_stopping_on_the_very_last_token_is_a_stop():
    engine, requests = engine_for(tiny_model()), requests_of([4])
    (free,) = engine.generate(requests, SamplingParams(3))
    last = free.response_ids[-1]
    assert last not in free.response_ids[:-1]
    (sample,) = engine.generate(requests, SamplingParams(3, stop_token_ids=(last,)))
    assert sample.response_ids == free.response_ids and sample.finish_reason == "stop"


@pytest.mark.parametrize("budget", [4096, 40])
def test_finished_rows_are_dropped_without_disturbing_the_others(budget, monkeypatch):
    selected = []
    select = decode.CacheLayer.select
    monkeypatch.setattr(
        decode.CacheLayer, "select", lambda self, rows: selected.append(len(rows)) or select(self, rows)
    )
    model = tiny_model()
    stops = tuple(range(0, VOCAB, 6))
    samples = engine_for(model, max_batch_tokens=budget).generate(
        requests_of([3, 9, 1, 5, 2, 8], copies=4), SamplingParams(24, stop_token_ids=stops)
    )
    assert_scored_right(model, samples, 1.0)
    assert len({len(s.response_ids) for s in samples}) > 3
    assert (len(selected) > 4) == (budget == 4096)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, so that a character may span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def chain_model(sequence: list[int], vocab: int = 256):
    """A model that continues each token of `sequence` (all distinct) with the next one."""
    model = tiny_model("llama", vocab_size=vocab, hidden_size=vocab, num_hidden_layers=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        model.lm_head.weight.zero_()
        for a, b in itertools.pairwise(sequence):
            model.lm_head.weight[b, a] = 1.0
    return model


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("abcdefgh", ("ef",), "abcdef"),
        ("abcdefgh", ("gh", "cd"), "abcd"),
        ("abcdefgh", ("a",), "a"),
        ("abcdefgh", ("xy",), "abcdefgh"),
        ("ab€cd", ("€",), "ab€"),
        ("ab\n\t!de", ("\n\t!",), "ab\n\t!"),
        ("The quick", (" quic",), "The quic"),
    ],
)
def test_a_stop_string_ends_the_response_with_the_token_that_completes_it(text, stops, want):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    start = tokenizer.encode("~")
    model = chain_model(start + ids)
    engine = engine_for(model, tokenizer=tokenizer)
    sampling = SamplingParams(len(ids), temperature=0.0, stop_strings=stops)
    (sample,) = engine.generate([GenerateRequest(0, 0, start, 0)], sampling)
    assert tokenizer.decode(sample.response_ids) == want
    assert sample.finish_reason == ("stop" if want.endswith(stops) else "length")


def test_stop_strings_agree_with_a_search_of_the_full_text():
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=256)
    engine = engine_for(model, tokenizer=tokenizer)
    requests = [GenerateRequest(i, 0, [3 + i % 5] * (1 + i % 4), seed=i) for i in range(60)]
    free = engine.generate(requests, SamplingParams(30))
    pieces = [tokenizer.decode(s.response_ids[6:8]) for s in free]
    stops = tuple(p for p in pieces if "�" not in p)[:5]
    stopped = engine.generate(requests, SamplingParams(30, stop_strings=stops, stop_token_ids=(9,)))
    reasons = set()
    for full, cut in zip(free, stopped, strict=True):
        want = next(
            (
                n
                for n in range(1, 31)
                if full.response_ids[n - 1] == 9 or any(s in tokenizer.decode(full.response_ids[:n]) for s in stops)
            ),
            None,
        )
        assert cut.response_ids == full.response_ids[: want or 30]
        assert cut.finish_reason == ("length" if want is None else "stop")
        reasons.add(cut.finish_reason)
    assert reasons == {"stop", "length"}


def test_an_update_takes_effect_at_once_and_marks_the_samples():
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    engine, requests = engine_for(old), requests_of(MIXED)
    before = engine.generate(requests, SamplingParams(8))
    report = engine.update_weights(new.state_dict().items(), version=2)
    assert (report.version, report.buckets) == (2, len(new.state_dict())) and report.seconds >= 0
    assert report.bytes == sum(4 * t.numel() for t in new.state_dict().values())
    after = engine.generate(requests, SamplingParams(8))
    assert {s.weight_version for s in before} == {1} and {s.weight_version for s in after} == {2}
    assert_scored_right(new, after, 1.0)
    assert [s.response_ids for s in after] == [
        s.response_ids for s in engine_for(new).generate(requests, SamplingParams(8))
    ]


def test_the_sender_keeps_its_tensors():
    model = tiny_model()
    engine = engine_for(model)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    engine.update_weights(weights.items(), 2)
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    assert_scored_right(model, engine.generate(requests_of([3]), SamplingParams(4)), 1.0)


def test_a_tied_head_need_not_be_sent():
    model = tiny_model("qwen2_tied")
    weights = dict(model.state_dict())
    del weights["lm_head.weight"]
    engine = engine_for(model, send=False)
    engine.update_weights(weights.items(), 1)
    assert_scored_right(model, engine.generate(requests_of(MIXED), SamplingParams(4)), 1.0)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    with pytest.raises(RuntimeError, match=r"lm_head\.weight is tied to model\.embed_tokens\.weight"):
        engine.update_weights(weights.items(), 2)


def test_an_untied_head_must_be_sent():
    weights = dict(tiny_model("qwen2").state_dict())
    del weights["lm_head.weight"]
    with pytest.raises(RuntimeError, match=r"1 weights were not sent, the first is lm_head\.weight"):
        engine_for(tiny_model("qwen2"), send=False).update_weights(weights.items(), 1)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w | {"model.nrm.weight": w[NORM]},
            r"model\.nrm\.weight is not a weight of Qwen2ForCausalLM",
        ),
        (lambda w: w | {NORM: w[NORM][:-1]}, r"model\.norm\.weight has shape \(63,\), .* expects \(64,\)"),
        (lambda w: {k: v for k, v in w.items() if k != NORM}, r"the first is model\.norm\.weight"),
    ],
)
def test_a_wrong_update_names_the_weight_and_disables_the_engine(change, message):
    model = tiny_model()
    engine = engine_for(model)
    with pytest.raises(RuntimeError, match=message):
        engine.update_weights(change(dict(model.state_dict())).items(), 2)
    assert not engine.health().ok
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate(requests_of([3]), SamplingParams(2))
    engine.update_weights(model.state_dict().items(), 3)
    assert engine.health().ok and engine.health().weight_version == 3


def test_a_weight_sent_twice_is_refused():
    model = tiny_model()
    twice = [*model.state_dict().items(), (NORM, model.state_dict()[NORM])]
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight was sent twice"):
        engine_for(model, send=False).update_weights(twice, 1)


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3"])
def test_sleep_frees_the_weights_and_an_update_after_wake_restores_them(family):
    model = tiny_model(family)
    engine, requests = engine_for(model), requests_of(MIXED)
    want = engine.generate(requests, SamplingParams(6))
    for _ in range(2):
        engine.sleep()
    assert all(p.untyped_storage().nbytes() == 0 for p in engine.model.parameters())
    assert not engine.health().ok and "asleep" in engine.health().detail
    with pytest.raises(RuntimeError, match="asleep"):
        engine.generate(requests, SamplingParams(6))
    with pytest.raises(RuntimeError, match="asleep"):
        engine.update_weights(model.state_dict().items(), 2)
    for _ in range(2):
        engine.wake()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate(requests, SamplingParams(6))
    engine.update_weights(model.state_dict().items(), 2)
    got = engine.generate(requests, SamplingParams(6))
    assert [s.response_ids for s in got] == [s.response_ids for s in want]


def test_buffers_that_no_checkpoint_holds_are_right():
    for family in FAMILIES:
        model = tiny_model(family)
        built = dict(engine_for(model).model.named_buffers())
        assert built
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(built[name], buffer, rtol=0, atol=0)
            assert built[name].dtype == buffer.dtype


def test_building_leaves_the_configuration_alone():
    config = tiny_hf_config("qwen2")
    before = config.to_dict()
    EmbeddedEngine(config, dtype=torch.bfloat16, device="cpu", max_batch_tokens=64, pad_token_id=0)
    assert config.to_dict() == before


def test_bf16_engine_generates_and_casts_on_update():
    model = tiny_model()
    engine = engine_for(model, dtype=torch.bfloat16)
    samples = engine.generate(requests_of(MIXED), SamplingParams(8))
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    for sample in samples:
        gap = torch.tensor(sample.logprobs) - forced_logprobs(model.float(), sample, 1.0)
        assert gap.abs().max() < 0.1


def test_no_requests_give_no_samples_even_without_weights():
    assert engine_for(tiny_model(), send=False).generate([], SamplingParams(4)) == []


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], SamplingParams(4), "sample 7: the prompt is empty"),
        ([3, VOCAB], SamplingParams(4), "prompt token 131 is outside"),
        ([3, -1], SamplingParams(4), "prompt token -1 is outside"),
        ([3] * 250, SamplingParams(7), "max_position_embeddings 256"),
        ([3] * 90, SamplingParams(20), "rollout.max_batch_tokens 100"),
        ([3], SamplingParams(4, stop_strings=("x",)), "needs a tokenizer"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt, sampling, message):
    engine = engine_for(tiny_model(), max_batch_tokens=100)
    with pytest.raises(UserError, match=message):
        engine.generate([GenerateRequest(7, 0, prompt, 0)], sampling)


def test_nan_weights_are_reported_not_sampled():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(UserError, match="non-finite log-probability in sample 0"):
        engine_for(model).generate(requests_of([3]), SamplingParams(4))


def test_models_with_other_layers_are_refused():
    config = tiny_hf_config("qwen2")
    config.layer_types = ["linear_attention"] * 3 + ["full_attention"]
    with pytest.raises(UserError, match="linear_attention"):
        EmbeddedEngine(config, dtype=torch.float32, device="cpu", max_batch_tokens=64, pad_token_id=0)


@pytest.mark.gpu
def test_on_cuda_logprobs_equal_a_teacher_forced_forward():
    model = tiny_model().cuda()
    samples = engine_for(model, device="cuda").generate(
        requests_of(MIXED, copies=4), SamplingParams(24, stop_token_ids=(5, 17, 40))
    )
    for sample in samples:
        want = forced_logprobs(model, sample, 1.0)
        torch.testing.assert_close(torch.tensor(sample.logprobs), want, rtol=0, atol=1e-4)
