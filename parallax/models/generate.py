"""Generate token ids, one after the other, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from parallax.errors import ConfigError
from parallax.models.decoder import DecoderStage
from parallax.models.key_value_cache import KeyValueCache
from parallax.models.sampling import Sampling

PROMPT_TOKENS = 512  # of a prompt are computed at once: their logits are as wide as the vocabulary


def generate(
    model: DecoderStage,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    stops: Sequence[Sequence[int]] = (),
    use_cache: bool = True,
) -> Iterator[int]:
    """Yield up to `max_tokens` ids that continue `prompt`, each as soon as it is chosen; greedily without `sampling`.

    Ends after the last id of one of the sequences in `stops`, or when the model has no more positions.
    use_cache: keep keys and values; without, every token computes the whole text again, for the same result.

    Raises ConfigError when the prompt is empty, has ids that the model has not, or is as long as the model's positions; or
    when the model's logits are no numbers.
    """
    config = model.config
    problem = _prompt_problem(prompt, config.vocab_size, config.max_position_embeddings)
    if problem is not None:
        raise ConfigError(problem)
    return _generate(model, list(prompt), max_tokens, sampling or Sampling(), [list(stop) for stop in stops], use_cache)


def _prompt_problem(prompt: Sequence[int], vocab_size: int, positions: int) -> str | None:
    if not prompt:
        return "the prompt has no token to begin from, and the tokenizer none that begins a text; give a longer one"
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if outside:
        return f"the prompt has the id {outside[0]}, the model only {vocab_size} ids; use the model's own tokenizer"
    if len(prompt) >= positions:
        return f"the prompt has {len(prompt)} tokens, which leaves no room in the model's {positions}; shorten it"
    return None


def _generate(
    model: DecoderStage, ids: list[int], max_tokens: int, sampling: Sampling, stops: list[list[int]], use_cache: bool
) -> Iterator[int]:
    device = next(model.parameters()).device
    count = min(max_tokens, model.config.max_position_embeddings - len(ids))
    cache = KeyValueCache(device) if use_cache else None
    generator = torch.Generator().manual_seed(sampling.seed)
    done = 0
    for _ in range(count):
        with torch.no_grad():  # not around the yield, where the caller's code runs
            logits = _next_logits(model, torch.tensor([ids[done:]], device=device), cache)
        done = len(ids) if use_cache else 0
        token = choose(logits, sampling, generator)
        ids.append(token)
        yield token
        if any(ids[-len(stop) :] == stop for stop in stops):
            return


def _next_logits(model: DecoderStage, ids: torch.Tensor, cache: KeyValueCache | None) -> torch.Tensor:
    """Return fp32 logits `[vocab]` behind the last of ids `[1, count]`, on the CPU."""
    parts = [ids] if cache is None else list(ids.split(PROMPT_TOKENS, 1))
    for part in parts:
        if cache is not None:
            cache.extend(part.shape[1])
        logits = model(part, cache)
    return logits[0, -1, : model.config.vocab_size].float().cpu()


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return the id of the next token, given its logits `[vocab]`."""
    if logits.isnan().any():
        raise ConfigError("the model's logits are no numbers (NaN): its weights are damaged, or training went wrong")
    if sampling.temperature == 0:
        return int(logits.argmax())
    tokens, probabilities = distribution(logits, sampling)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def distribution(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that may follow, likeliest first, and their probabilities; not of a temperature of 0."""
    # Less the largest first, so that a low temperature does not reach infinity.
    values, tokens = ((logits - logits.max()) / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, tokens = values[: sampling.top_k], tokens[: sampling.top_k]
    probabilities = values.softmax(0)
    kept = len(tokens)
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        kept = max(1, int((before < sampling.top_p).sum()))
    return tokens[:kept], probabilities[:kept] / probabilities[:kept].sum()
