"""FP8 as flags, with checks that need no torch: what a GPU could not do is refused on a CPU too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from parallax.flags import named
from parallax.precision.recipe import LARGEST_MARGIN, Recipe, is_kept, unmatched

MULTIPLE = 16  # elements: tensor cores take FP8 in lines of 16 bytes
ROW_PARALLEL = ("o_proj", "down_proj")  # whose inputs tensor parallelism cuts, and not their outputs

Layers = Mapping[str, tuple[int, int]]  # {name: (outputs, inputs)}


@dataclass(frozen=True)
class Fp8Options:
    """How linear layers run with --precision fp8."""

    fp8_recipe: Literal["tile", "delayed"] = "tile"
    """Scales: one for each tile (1x128 of activations, 128x128 of weights), or one for a tensor, from earlier steps."""

    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"
    """E4M3 everywhere, or E5M2 (more range, less precision) for gradients."""

    fp8_scales: Literal["fp32", "pow2"] = "fp32"
    """Scales of tiles: any number, or powers of two."""

    fp8_backend: Literal["auto", "te", "torch", "triton", "reference"] = "auto"
    """What computes: Transformer Engine, torch's scaled products, our kernels, plain PyTorch; auto: the best that runs here."""

    fp8_keep: Annotated[tuple[str, ...], named("fp8-keep", metavar="PATTERN", default="none")] = ()
    """Layers that stay in bf16, by name, as in: layers.0 "mlp.down_*". Embedding, norms and head always do."""

    fp8_amax_history: Annotated[int, named("fp8-amax-history", "fp8-amax-history-len")] = 16
    """Steps whose amaxes a delayed scale looks back on."""

    fp8_margin: int = 0
    """Powers of two that a delayed scale leaves above the greatest amax."""

    @property
    def recipe(self) -> Recipe:
        return _recipe(self)

    @property
    def changed(self) -> list[str]:
        """The options that are not as they are by default."""
        default = Fp8Options()
        return [name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(default, name)]

    @staticmethod
    def without_effect(precision: str, given: Sequence[str]) -> list[str]:
        """Return a sentence for each option that was given and means nothing with a precision."""
        return [
            f"--{name.replace('_', '-')} has no effect with --precision {precision}; leave it out, or use --precision fp8"
            for name in (given if precision != "fp8" else ())
        ]

    def check(self, precision: str, kernels: str = "on") -> list[str]:
        """Return what contradicts itself here, with --precision or with --kernels, a sentence each."""
        if precision != "fp8":
            return self.without_effect(precision, self.changed)
        problems = []
        if self.fp8_backend == "triton" and kernels == "off":
            problems.append(
                "--fp8-backend triton computes with our kernels, which --kernels off turns off; leave one of them out"
            )
        if self.fp8_recipe == "delayed" and self.fp8_scales == "pow2":
            problems.append("--fp8-scales pow2 goes with --fp8-recipe tile; a delayed scale is any number")
        if self.fp8_recipe == "tile":
            problems += [
                f"--fp8-{name} {value} has no effect with --fp8-recipe tile; use it with delayed"
                for name, value, unset in (
                    ("amax-history", self.fp8_amax_history, Fp8Options.fp8_amax_history),
                    ("margin", self.fp8_margin, Fp8Options.fp8_margin),
                )
                if value != unset
            ]
        if not 1 <= self.fp8_amax_history <= 4096:
            problems.append(f"--fp8-amax-history {self.fp8_amax_history} must be between 1 and 4096")
        if not 0 <= self.fp8_margin <= LARGEST_MARGIN:
            problems.append(f"--fp8-margin {self.fp8_margin} must be between 0 and {LARGEST_MARGIN}")
        return problems

    def check_model(self, layers: Layers, seq_len: int, tp: int = 1) -> list[str]:
        """Return what keeps the layers, cut into tp shares, from running in FP8 on a GPU, a sentence each.

        seq_len: tokens of a sample, which the products of weight gradients sum over.
        """
        problems = [
            f"--fp8-keep {pattern if pattern.strip() else repr(pattern)} names no layer; layers are called "
            f"{', '.join(list(layers)[:2])} and so on, and a pattern may be a part of a name, as in: layers.0 down_proj"
            for pattern in unmatched(self.fp8_keep, list(layers))
        ]
        fp8 = self._in_fp8(layers)
        if not fp8:
            problems.append("--fp8-keep leaves no layer in FP8; use --precision bf16, or name fewer layers")
        odd: dict[int, list[str]] = {}
        for name, sizes in fp8.items():
            for size in sizes:
                if size % MULTIPLE:
                    odd.setdefault(size, []).append(name)
        problems += [
            f"--precision fp8 needs sizes that are multiples of {MULTIPLE}, and {size} (of {names[0]}) is none; "
            f"use {_nearest(size)}, or --fp8-keep {_last_parts(names)}"
            for size, names in odd.items()
        ]
        if seq_len % MULTIPLE:
            problems.append(
                f"--precision fp8 needs --seq-len to be a multiple of {MULTIPLE}, not {seq_len}; use {_nearest(seq_len)}"
            )
        return problems or self.check_shares(layers, tp)

    def shares(self, layers: Layers, tp: int) -> dict[str, int]:
        """Return the size of the dim that tp ranks cut, as each has it, for each layer that runs in FP8; nothing is cut for one."""
        cut = {name: sizes[name.split(".")[-1] in ROW_PARALLEL] for name, sizes in self._in_fp8(layers).items()}
        return {} if tp == 1 else {name: size // tp for name, size in cut.items() if size % tp == 0}

    def check_shares(self, layers: Layers, tp: int) -> list[str]:
        """Return what keeps tp ranks' shares from running in FP8 on a GPU, a sentence each; tiles may be cut anywhere."""
        odd: dict[int, list[str]] = {}
        for name, share in self.shares(layers, tp).items():
            if self.fp8_recipe == "delayed" and share % MULTIPLE:
                odd.setdefault(share, []).append(name)
        return [
            f"--fp8-recipe delayed needs tensor-parallel shares that are multiples of {MULTIPLE}, and --tp {tp} makes them {share} "
            f"(of {names[0]}); use another --tp, sizes that divide by {MULTIPLE * tp}, --fp8-recipe tile, "
            f"or --fp8-keep {_last_parts(names)}"
            for share, names in odd.items()
        ]

    def check_key_value_heads(self, layers: Layers, heads: int, tp: int) -> list[str]:
        """Return what keeps tp ranks that share a key-value head from quantising its gradient: each has a part of it."""
        shared = [name for name in self._in_fp8(layers) if name.split(".")[-1] in ("k_proj", "v_proj")]
        if tp <= heads or tp % heads or not shared:  # what does not divide is told of the model
            return []
        return [
            f"--precision fp8 with --tp {tp} needs as many key-value heads, not {heads}: the {tp // heads} ranks that share one "
            f"each have a part of its gradient; use --tp {heads} or less, or --fp8-keep {_last_parts(shared)}"
        ]

    def _in_fp8(self, layers: Layers) -> dict[str, tuple[int, int]]:
        return {name: sizes for name, sizes in layers.items() if not is_kept(name, self.fp8_keep)}


def _recipe(options: Fp8Options) -> Recipe:
    return Recipe(
        scaling=options.fp8_recipe,
        fp8_format=options.fp8_format,
        power_of_two_scales=options.fp8_scales == "pow2",
        amax_history_len=options.fp8_amax_history,
        margin=options.fp8_margin,
        keep=options.fp8_keep,
    )


def _last_parts(names: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(name.split(".")[-1] for name in names))


def _nearest(size: int) -> str:
    below = size // MULTIPLE * MULTIPLE
    return " or ".join(str(n) for n in (below, below + MULTIPLE) if n)
