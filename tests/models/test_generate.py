"""Generation against transformers': the same tokens greedily, the same distribution otherwise."""

from typing import Any

import pytest
import torch

from parallax.errors import ConfigError
from parallax.models import generate as module
from parallax.models.decoder import DecoderStage
from parallax.models.generate import choose, distribution, generate
from parallax.models.hugging_face_config import from_hugging_face
from parallax.models.sampling import Sampling
from tests.models.test_against_transformers import FAMILIES, load

transformers = pytest.importorskip("transformers", reason="transformers is the reference; install the test extra")
PROMPT = [3, 100, 41, 5, 9, 77, 12, 12, 6]
COUNT = 30


def make_models(family: str) -> tuple[Any, DecoderStage]:
    """Return the same random model, transformers' and ours."""
    torch.manual_seed(5)
    reference = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    for parameter in reference.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    stage = DecoderStage(from_hugging_face(reference.config.to_dict()))
    for parameter in stage.parameters():
        parameter.data.zero_()
    load(stage, reference.state_dict())
    return reference, stage


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers_with_and_without_a_cache(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, stage = make_models(family)
    reference.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    expected = reference.generate(ids, max_new_tokens=COUNT, do_sample=False, attention_mask=torch.ones_like(ids))
    expected = expected[0, len(PROMPT) :].tolist()
    assert len(set(expected)) > 3, "a model that repeats itself shows little"
    assert list(generate(stage, PROMPT, max_tokens=COUNT)) == expected
    assert list(generate(stage, PROMPT, max_tokens=COUNT, use_cache=False)) == expected
    monkeypatch.setattr(module, "PROMPT_TOKENS", 4)  # the prompt in parts
    assert list(generate(stage, PROMPT, max_tokens=COUNT)) == expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0, top_k=5),
        Sampling(1.3, top_p=0.8),
        Sampling(0.9, top_k=20, top_p=0.5),
        Sampling(1.0, top_p=1e-9),
        Sampling(1e-30, top_p=0.9),
    ],
)
def test_the_distribution_is_that_of_transformers(sampling: Sampling) -> None:
    logits = 3 * torch.randn(200, generator=torch.Generator().manual_seed(1))
    expected = transformers.TemperatureLogitsWarper(max(sampling.temperature, 1e-10))(None, logits[None])
    if sampling.top_k:
        expected = transformers.TopKLogitsWarper(sampling.top_k)(None, expected)
    if sampling.top_p < 1:
        expected = transformers.TopPLogitsWarper(sampling.top_p)(None, expected)
    found = torch.zeros(200)
    tokens, probabilities = distribution(logits.clone(), sampling)
    found[tokens] = probabilities
    torch.testing.assert_close(found, expected[0].softmax(0), atol=1e-6, rtol=1e-5)


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -5.0])
    generator = torch.Generator().manual_seed(0)
    drawn = [choose(logits.clone(), Sampling(0.8, top_k=3), generator) for _ in range(4000)]
    expected = (logits[:3] / 0.8).softmax(0)
    found = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    assert found[3] == 0 and (found[:3] - expected).abs().max() < 0.03


def test_a_seed_decides_the_text() -> None:
    _, stage = make_models("llama")
    texts = [
        list(generate(stage, PROMPT, max_tokens=20, sampling=Sampling(1.0, seed=seed), use_cache=cache))
        for seed, cache in ((1, True), (1, False), (2, True))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_generation_ends_with_the_stop_and_where_the_positions_do() -> None:
    _, stage = make_models("gpt2")
    free = list(generate(stage, PROMPT, max_tokens=20))
    where = free.index(free[6])
    assert list(generate(stage, PROMPT, max_tokens=20, stops=[[129, 129], [free[6]]])) == free[: where + 1]
    assert list(generate(stage, PROMPT, max_tokens=20, stops=[free[3:6]])) == free[:6]
    assert len(list(generate(stage, PROMPT, max_tokens=1000))) == 64 - len(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "the prompt has no token to begin from"),
        ([1, 130], "the prompt has the id 130, the model only 130 ids"),
        ([1, -1], "the prompt has the id -1"),
        ([1] * 64, "the prompt has 64 tokens, which leaves no room in the model's 64"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_before_anything_is_computed(prompt: list[int], said: str) -> None:
    _, stage = make_models("llama")
    with pytest.raises(ConfigError, match=said):
        generate(stage, prompt, max_tokens=5)


def test_weights_that_are_no_numbers_are_said() -> None:
    _, stage = make_models("llama")
    stage.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(ConfigError, match="logits are no numbers"):
        list(generate(stage, PROMPT, max_tokens=5))


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(-1.0), "--temperature -1.0 must be a number from 0"),
        (Sampling(float("nan")), "--temperature nan"),
        (Sampling(float("inf")), "--temperature inf"),
        (Sampling(1.0, top_p=0.0), "--top-p 0.0 must be above 0"),
        (Sampling(1.0, top_p=float("nan")), "--top-p nan"),
        (Sampling(1.0, top_k=-1), "--top-k -1 must be 0"),
        (Sampling(1.0, seed=-1), "--seed -1"),
        (Sampling(0.0, top_p=0.5), "needs a --temperature above 0"),
    ],
)
def test_a_way_to_choose_that_is_none_is_refused(sampling: Sampling, said: str) -> None:
    assert len(sampling.check()) == 1 and said in sampling.check()[0]
