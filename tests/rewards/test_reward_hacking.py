"""The hacking watch: known copies are found, in any layout, and estimates stay close."""

import numpy as np
import pytest

from megappo.rewards.hacking import HackingRules, _have_twin, hacking_metrics, sketch

RULES = HackingRules()


class Batch:
    """Prompts and responses of token ids."""

    def __init__(self, pairs):
        self.pairs = [(np.asarray(p, np.int64), np.asarray(r, np.int64)) for p, r in pairs]
        self.lengths = np.array([len(r) for _, r in self.pairs])

    def sketch(self, indices, rules=RULES):
        held = [self.pairs[i] for i in indices]
        tokens = np.concatenate([np.empty(0, np.int64), *(part for pair in held for part in pair)])
        cu = np.cumsum([0, *(len(p) + len(r) for p, r in held)])
        prompt_len = np.array([len(p) for p, _ in held], np.int64)
        return sketch(tokens, cu, prompt_len, np.array(indices), int(self.lengths.sum()), rules)

    def metrics(self, scores=None, groups=None, counted=None, ranks=None, rules=RULES):
        n = len(self.pairs)
        sketches = [self.sketch(indices, rules) for indices in (ranks or [range(n)])]
        scores = np.ones(n) if scores is None else np.array(scores, float)
        groups = np.arange(n) if groups is None else np.array(groups)
        found = hacking_metrics(sketches, scores, groups, self.lengths, counted, rules)
        assert all(np.isfinite(value) and name.startswith("hacking/") for name, value in found.items())
        return {name.removeprefix("hacking/"): value for name, value in found.items()}


def random_batch(rng, n, length=40, prompt=20, vocabulary=5000):
    return [(rng.integers(0, vocabulary, prompt), rng.integers(0, vocabulary, length)) for _ in range(n)]


def test_different_responses_raise_nothing():
    found = Batch(random_batch(np.random.default_rng(0), 50)).metrics()
    for name in ("duplicate_share", "cross_prompt_duplicate_share", "near_duplicate_share", "prompt_copy_share"):
        assert found[name] == 0.0
    assert found["distinct_4"] == 1.0 and found["high_reward_share"] == 1.0


def test_exact_copies_are_counted_among_well_paid_responses():
    pairs = random_batch(np.random.default_rng(1), 10)
    for i in (1, 2, 9):
        pairs[i] = (pairs[i][0], pairs[0][1])
    scores = [1, 1, 0.8, 1, 1, 1, 1, 1, 0.79, 0]  # 8 well paid; the copy of sample 9 is not
    found = Batch(pairs).metrics(scores)
    assert found["high_reward_share"] == 0.8
    assert found["duplicate_share"] == found["near_duplicate_share"] == 3 / 8
    assert found["cross_prompt_duplicate_share"] == 3 / 8
    assert Batch(pairs).metrics(np.zeros(10))["duplicate_share"] == 0.0


def test_copies_within_one_prompt_are_told_apart_from_copies_across_prompts():
    pairs = random_batch(np.random.default_rng(2), 4)
    pairs[1] = pairs[0]
    found = Batch(pairs).metrics(groups=[0, 0, 1, 1])
    assert found["duplicate_share"] == 0.5 and found["cross_prompt_duplicate_share"] == 0.0


def test_near_duplicates_are_found_and_half_equal_responses_are_not():
    rng = np.random.default_rng(3)
    pairs = random_batch(rng, 20, length=400)
    for i in range(0, 8, 2):  # every change breaks five 5-grams: Jaccard about 0.95
        text = pairs[i][1].copy()
        text[[100, 300]] += 1
        pairs[i + 1] = (pairs[i + 1][0], text)
    half = pairs[10][1].copy()
    half[:200] = rng.integers(0, 5000, 200)  # Jaccard about 1/3
    pairs[11] = (pairs[11][0], half)
    found = Batch(pairs).metrics()
    assert found["near_duplicate_share"] == 8 / 20 and found["duplicate_share"] == 0.0


@pytest.mark.parametrize("length", [0, 1, 4])
def test_responses_shorter_than_an_ngram_are_compared_as_a_whole(length):
    pairs = [([1, 2, 3], [7] * length), ([4, 5, 6], [7] * length), ([1], [8, 9, 9])]
    found = Batch(pairs).metrics()
    assert found["duplicate_share"] == found["near_duplicate_share"] == pytest.approx(2 / 3)
    assert found["prompt_copy_share"] == 0.0


def test_order_and_length_of_tokens_matter_for_copies():
    found = Batch([([1], [1, 2, 3]), ([1], [3, 2, 1]), ([1], [0]), ([1], [0, 0])]).metrics()
    assert found["duplicate_share"] == 0.0


@pytest.mark.parametrize("length", [60, 3000])
def test_copied_prompts_are_found(length):
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, 5000, length)
    pairs = [
        (prompt, prompt),
        (prompt, prompt[5:]),  # a part of it
        (prompt, np.concatenate([prompt, [2]])),  # an end token behind it
        (prompt, rng.integers(0, 5000, length)),
        (rng.integers(0, 5000, length), prompt),  # another prompt's text
        (prompt, prompt[:3]),  # too short to tell
    ]
    assert Batch(pairs).metrics()["prompt_copy_share"] == 3 / 6


def test_length_that_pays_is_correlated():
    rng = np.random.default_rng(5)
    pairs = [(rng.integers(0, 99, 5), rng.integers(0, 99, n)) for n in (10, 20, 30, 40)]
    assert Batch(pairs).metrics([1, 2, 3, 4])["length_correlation"] == pytest.approx(1.0)
    assert Batch(pairs).metrics([4, 3, 2, 1])["length_correlation"] == pytest.approx(-1.0)
    assert Batch(pairs).metrics([1, 1, 1, 1])["length_correlation"] == 0.0
    # The prompts with longer answers pay more, but within a prompt it is the shorter answer.
    found = Batch(pairs).metrics([1, 0, 3, 2], groups=[0, 0, 1, 1])
    assert found["length_correlation"] > 0.5 and found["length_correlation_in_group"] == pytest.approx(-1.0)


def test_repetition_lowers_distinct_4():
    loop = np.tile([1, 2, 3, 4], 25)
    assert Batch([([9], loop)]).metrics()["distinct_4"] == pytest.approx(4 / 97)
    assert Batch([([9], loop), ([9], loop)]).metrics()["distinct_4"] == pytest.approx(2 / 97)


def test_the_numbers_do_not_depend_on_which_rank_holds_what():
    rng = np.random.default_rng(6)
    pairs = random_batch(rng, 24, vocabulary=30)
    pairs[5], pairs[17] = (pairs[5][0], pairs[3][1]), (pairs[17][0], pairs[17][0])
    batch, scores, groups = Batch(pairs), rng.random(24), np.arange(24) // 4
    alone = batch.metrics(scores, groups)
    spread = batch.metrics(scores, groups, ranks=[[20, 3, 5], [], [i for i in range(24) if i not in (3, 5, 20)]])
    assert spread == alone


def test_samples_that_do_not_count_are_left_out_of_shares_and_correlations():
    pairs = random_batch(np.random.default_rng(7), 4)
    pairs[1] = pairs[0]
    found = Batch(pairs).metrics(counted=np.array([True, False, True, True]))
    assert found["duplicate_share"] == 0.0


@pytest.mark.parametrize("pairs", [[], [([1, 2], [])]])
def test_nothing_to_look_at_gives_finite_numbers(pairs):
    found = Batch(pairs).metrics(np.zeros(len(pairs)))
    assert found["distinct_4"] == 1.0 and found["high_reward_share"] == found["length_correlation"] == 0.0


def test_beyond_its_limits_it_estimates_from_a_sample():
    rng = np.random.default_rng(8)
    pairs = random_batch(rng, 400, length=60)
    for i in range(0, 200, 2):
        text = pairs[i][1].copy()
        text[30] += 1
        pairs[i + 1] = (pairs[i + 1][0], text)
    batch = Batch(pairs)
    exact = batch.metrics()
    rough = batch.metrics(rules=HackingRules(max_pairs=400 * 100, max_grams=2000))
    assert 0.4 < exact["near_duplicate_share"] <= 0.5
    assert rough["near_duplicate_share"] == pytest.approx(exact["near_duplicate_share"], abs=0.15)
    assert rough["distinct_4"] == pytest.approx(exact["distinct_4"], rel=0.15)
    assert len(batch.sketch(range(400), HackingRules(max_grams=2000)).grams) < 2500


def test_estimated_similarity_is_the_jaccard_similarity():
    """The verdict flips near the true similarity: 64 bins tell it to about 0.06."""
    rng = np.random.default_rng(9)
    for overlap in (0.6, 0.95):
        shared = int(2000 * 2 * overlap / (1 + overlap))  # of 2,000 n-grams each
        text = rng.integers(0, 1 << 30, 2004)
        other = np.concatenate([text[: shared + 4], rng.integers(0, 1 << 30, 2000 - shared)])
        bins = Batch([([1], text), ([1], other)]).sketch([0, 1]).bins
        assert _have_twin(bins, np.array([0, 1]), 0.8).tolist() == [overlap > 0.8] * 2
