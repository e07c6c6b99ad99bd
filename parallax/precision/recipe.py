"""What of a model runs in FP8, as a value: the recipe, and the table of layers that follows from it. No torch here.

A linear layer has three products: fprop y = x W^T, dgrad dx = dy W, wgrad dW = dy^T x. Each sums over one dim, and its two
operands are quantised along that dim.

              tile                                   delayed
    fprop     x e4m3 1x128,   W e4m3 128x128         one scale a tensor, from earlier steps: x and W e4m3,
    dgrad     dy e4m3 1x128,  W e4m3 128x128         dy e4m3, or e5m2 with the hybrid format
    wgrad     dy e4m3 128x1,  x e4m3 128x1

Embedding, head, norms, the core of attention and the residual stay in bf16 and fp32, as they do at DeepSeek-V3 (DeepSeek-AI
2024, arXiv:2412.19437, 3.3.1), and so do the layers whose names match a pattern of `keep`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

PRODUCTS = ("fprop", "dgrad", "wgrad")
ALWAYS_KEPT = ("lm_head",)
LARGEST_MARGIN = 8  # more, and the delayed scale of fp32's greatest number would have no reciprocal
KEPT = dict.fromkeys(PRODUCTS, "bf16")

_NUMBER = re.compile(r"\.(\d+)\.", re.ASCII)  # of a layer, in its name
_RANGES = re.compile(r"(?<![^.])\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*(?![^.])", re.ASCII)  # a whole part of a pattern: 0,2-5

Table = dict[str, dict[str, str]]  # {layer: {product: how it runs}}


@dataclass(frozen=True)
class Recipe:
    """How linear layers run in FP8.

    scaling: "tile" (a scale for each tile of what is at hand) or "delayed" (one for a tensor, from its past amaxes).
    fp8_format: "e4m3" everywhere, or "hybrid": E5M2, of more range and less precision, for gradients of outputs.
    power_of_two_scales: of tiles; loses up to a bit of range, and multiplying by such a scale rounds nothing.
    amax_history_len, margin: see `parallax.precision.DelayedScaling`. keep: patterns of layers that stay in bf16.
    Raises ValueError for what is none of these, and for what means nothing with the scaling.
    """

    scaling: str = "tile"
    fp8_format: str = "e4m3"
    power_of_two_scales: bool = False
    amax_history_len: int = 16
    margin: int = 0
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("scaling", ("tile", "delayed")), ("fp8_format", ("e4m3", "hybrid"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use {known[0]!r} or {known[1]!r}")
        if type(self.power_of_two_scales) is not bool:
            raise ValueError(f"power_of_two_scales={self.power_of_two_scales!r} must be True or False")
        if type(self.amax_history_len) is not int or self.amax_history_len < 1:
            raise ValueError(f"amax_history_len={self.amax_history_len!r} must be at least 1, and a whole number")
        if type(self.margin) is not int or not 0 <= self.margin <= LARGEST_MARGIN:
            raise ValueError(f"margin={self.margin!r} must be between 0 and {LARGEST_MARGIN}, and a whole number")
        if self.power_of_two_scales and self.scaling == "delayed":
            raise ValueError("power_of_two_scales=True goes with scaling='tile'; a delayed scale is any number")
        if self.scaling == "tile":
            for name, unset in (("amax_history_len", Recipe.amax_history_len), ("margin", Recipe.margin)):
                if getattr(self, name) != unset:
                    raise ValueError(
                        f"{name}={getattr(self, name)} goes with scaling='delayed'; the scale of a tile is of what is at hand"
                    )
        object.__setattr__(self, "keep", _patterns(self.keep))

    @property
    def gradient_format(self) -> str:
        return "e5m2" if self.fp8_format == "hybrid" else "e4m3"

    def products(self) -> dict[str, str]:
        """Return how each product of an FP8 layer runs, in words."""
        if self.scaling == "delayed":
            x, w, gradient = ("e4m3 tensor",) * 2 + (f"{self.gradient_format} tensor",)
            return {"fprop": f"{x} x {w}", "dgrad": f"{gradient} x {w}", "wgrad": f"{gradient} x {x}"}
        gradient = self.gradient_format
        return {
            "fprop": "e4m3 1x128 x e4m3 128x128",
            "dgrad": f"{gradient} 1x128 x e4m3 128x128",
            "wgrad": f"{gradient} 128x1 x e4m3 128x1",
        }

    def keeps(self, layer: str) -> bool:
        """Whether the layer of this name stays in bf16."""
        return is_kept(layer, self.keep)

    def table(self, layers: Iterable[str]) -> Table:
        """Return how the products of each layer run."""
        return {layer: dict(KEPT) if self.keeps(layer) else self.products() for layer in layers}


def _patterns(keep: object) -> tuple[str, ...]:
    # Once: what can be iterated over only once would be empty the second time.
    patterns = tuple(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else None
    if patterns is None or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(
            f"keep={(keep if patterns is None else patterns)!r} must be a tuple of patterns that are not empty, "
            "as in ('layers.0', 'down_proj')"
        )
    return patterns


def is_kept(layer: str, keep: Iterable[str]) -> bool:
    """Whether a layer stays in bf16: always, or for a pattern of `keep`."""
    return any(matches(pattern, layer) for pattern in (*ALWAYS_KEPT, *keep))


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern (* and ? as in file names) names the layer, or something that it is a part of: layers.0, o_proj.

    Numbers may be ranges, as the table has them: layers.0,2-5.mlp.
    """
    number = _NUMBER.search(layer)
    if number is not None:
        index = int(number.group(1))
        pattern = _RANGES.sub(lambda found: str(index) if _contains(found.group(), index) else found.group(), pattern)
    parts = layer.split(".")
    spans = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
    return any(fnmatchcase(span, pattern) for span in spans)


def _contains(ranges: str, index: int) -> bool:
    ends = (part.partition("-") for part in ranges.split(","))
    return any(int(first) <= index <= int(last or first) for first, _, last in ends)


def unmatched(keep: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return the patterns that name no layer."""
    return [pattern for pattern in keep if not any(matches(pattern, layer) for layer in layers)]


def in_words(table: Table) -> list[str]:
    """Return a line for each kind of layer, with the numbers of the layers that are alike as ranges."""
    alike: dict[tuple[str, str], list[int]] = {}
    for layer, products in table.items():
        how = (
            products["fprop"]
            if len(set(products.values())) == 1
            else ", ".join(f"{product} {products[product]}" for product in PRODUCTS)
        )
        number = _NUMBER.search(layer)
        name = layer if number is None else f"{layer[: number.start()]}.N.{layer[number.end() :]}"
        alike.setdefault((name, how), []).append(-1 if number is None else int(number.group(1)))
    width = max((len(_numbered(name, numbers)) for (name, _), numbers in alike.items()), default=0)
    return [f"{_numbered(name, numbers):{width}}  {how}" for (name, how), numbers in alike.items()]


def _numbered(name: str, numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
    return name.replace(".N.", f".{shown}.")
