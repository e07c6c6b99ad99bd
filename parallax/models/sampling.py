"""How the next token is chosen; no torch here, so that options are checked before it is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """temperature: what logits are divided by; 0 takes the likeliest token. Then, of the tokens, only the `top_k` likeliest
    (0: all), and of those the fewest whose probabilities add up to `top_p` (Holtzman et al. 2020, arXiv:1904.09751).
    seed: equal seeds give equal texts, of one model, prompt and machine.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> list[str]:
        """Return what is wrong, a sentence each."""
        problems = []
        if not 0 <= self.temperature < math.inf:
            problems.append(
                f"--temperature {self.temperature} must be a number from 0, which takes the likeliest token, on"
            )
        if not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p} must be above 0 and at most 1, which keeps all tokens")
        if self.top_k < 0:
            problems.append(f"--top-k {self.top_k} must be 0, which keeps all tokens, or more")
        if not 0 <= self.seed < 1 << 63:
            problems.append(f"--seed {self.seed} must be from 0 to 2^63 - 1")
        if self.temperature == 0 and (self.top_k > 0 or self.top_p < 1):
            problems.append("--top-p and --top-k choose among tokens, which needs a --temperature above 0, such as 0.8")
        return problems
