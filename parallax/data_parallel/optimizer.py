"""The optimizer on the slices of the buckets that are kept on this rank.

Each bucket is updated by the rule that its key names (`parallax.data_parallel.rules`): one flat tensor for the part of a slice
that decays and one for the part that does not. States are cut up by parameter only when a checkpoint asks: neither buckets
nor ZeRO show in what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from parallax.data_parallel.bucket import GradientBuckets
from parallax.data_parallel.flat import GradientTypes
from parallax.data_parallel.muon import Muon, is_for_muon
from parallax.data_parallel.offload import REGION_ELEMENTS, Copies, Offloaded, StreamCopies, host_copy
from parallax.data_parallel.options import OptimizerOptions, used_momentum
from parallax.data_parallel.rules import SGD, AdamW, Region, Rule, Update, make_regions
from parallax.tensor_parallel.facts import ParameterFacts


@dataclass(frozen=True)
class StatePiece:
    """The part of one parameter's optimizer state that is kept on this rank.

    It is the flat range [start, stop) of the local parameter (tp-sharded, padded, row-major). tensors: "exp_avg",
    "exp_avg_sq" or "momentum_buffer", as its rule says, and, if the parameter is not its own, "main_param"; live views
    `[stop - start]`, to be copied before the next step by who saves them and overwritten in place by who loads them.
    """

    start: int
    stop: int
    tensors: dict[str, torch.Tensor]


def _piece(region: Region, offset: int, stop: int) -> StatePiece | None:
    """Return what lies in a region of the parameter at [offset, stop) of its bucket."""
    first, last = max(offset, region.start), min(stop, region.stop)
    if first >= last:
        return None
    here = slice(first - region.start, last - region.start)
    tensors = {name: state[here] for name, state in region.states.items()}
    if region.bucket.has_own_main_params:
        tensors["main_param"] = region.main_param[here]
    return StatePiece(first - offset, last - offset, tensors)


class ShardedOptimizer:
    """An optimizer sharded as the buckets are.

    rules: by the names in the buckets' keys. moment_dtype: of the states that rules keep; None: the main parameters'.
    offload: copies to and from the host, to have states there; None to have them on the device.
    """

    offload_is_idle = False  # asked for where there is nothing to offload to

    def __init__(
        self,
        buckets: GradientBuckets,
        rules: Mapping[str, Rule],
        moment_dtype: torch.dtype | None = None,
        offload: Copies | None = None,
    ) -> None:
        self.buckets, self.offload = buckets, offload
        self._rules = (
            dict(rules) if offload is None else {name: Offloaded(rule, offload) for name, rule in rules.items()}
        )
        self._regions: dict[str, list[Region]] = {name: [] for name in rules}
        for bucket in buckets.buckets:
            name = bucket.plan.key.rule
            if offload is None:
                self._regions[name] += make_regions(bucket, rules[name].states, moment_dtype)
                continue
            if bucket.has_own_main_params:
                bucket.main_params, bucket.has_offloaded_main_params = host_copy(bucket.main_params), True
            for region in make_regions(bucket, rules[name].states, moment_dtype, REGION_ELEMENTS):
                on_host = {state: host_copy(values) for state, values in region.states.items()}
                self._regions[name].append(replace(region, states=on_host))
        self._step_count = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of all states on this rank, and of main parameters that are not the model's own."""
        total = 0
        for region in (region for regions in self._regions.values() for region in regions):
            total += sum(state.nbytes for state in region.states.values())
            total += region.main_param.nbytes if region.bucket.has_own_main_params else 0
        return total

    @property
    def step_count(self) -> int:
        """Number of updates done, for the bias correction; set when a state is loaded."""
        return self._step_count

    @step_count.setter
    def step_count(self, steps: int) -> None:
        self._step_count = steps
        for regions in self._regions.values():
            for region in regions:
                region.step.fill_(steps)

    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        clip_coefficient: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Update the parameters on all holders; called by every rank after `finish()`.

        clip_coefficient: scalar that multiplies the gradients, on their device; None for 1.
        skip: fp32 scalar there, the same on all ranks; 1 leaves parameters and states as they are, and `take_back_count`
            is to be called once that is known here. Nothing waits for its value.
        """
        self.buckets.check_finished("step()")
        update = Update(learning_rate, clip_coefficient, skip)
        for name, rule in self._rules.items():
            rule.update(self._regions[name], update)
        self._step_count += 1
        self.buckets.spread_parameters()

    def take_back_count(self) -> None:
        """Count one update less: one that was skipped."""
        self._step_count -= 1  # that of the regions, on the device, has not moved

    def pieces(self, name: str) -> list[StatePiece]:
        """Return what this rank keeps of the state of the parameter `name`; nothing if other holders keep all of it."""
        if self.offload is not None:
            self.offload.finish()
        pieces = (
            _piece(region, place.offset, place.stop)
            for regions in self._regions.values()
            for region in regions
            for place in region.bucket.plan.places
            if place.name == name
        )
        return [piece for piece in pieces if piece is not None]

    def weights(self, name: str) -> list[tuple[int, int, torch.Tensor]] | None:
        """Return what this rank has of the parameter itself between uses; see `GradientBuckets.weights`."""
        return self.buckets.weights(name)


class ShardedAdamW(ShardedOptimizer):
    """AdamW for all parameters; see `rules.AdamW`."""

    def __init__(
        self,
        buckets: GradientBuckets,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(buckets, {"adamw": AdamW(betas, eps, weight_decay)})


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rule_of(options: OptimizerOptions) -> Callable[[ParameterFacts], str]:
    """Return what names the rule that updates a parameter, given its facts."""
    if options.optimizer == "muon":
        return lambda facts: "muon" if is_for_muon(facts) else "adamw"
    return lambda facts: options.optimizer


def make_optimizer(buckets: GradientBuckets, options: OptimizerOptions) -> ShardedOptimizer:
    """Return the optimizer that the options ask for; its buckets were made with their `rule_of`. Called by all ranks."""
    adamw = AdamW((options.beta1, options.beta2), options.eps, options.weight_decay)
    rules: dict[str, Rule] = {"adamw": adamw}
    if options.optimizer == "sgd":
        rules = {"sgd": SGD(used_momentum(options), options.weight_decay)}
    if options.optimizer == "muon":
        rules["muon"] = Muon(buckets, used_momentum(options), options.weight_decay)
    narrow = options.moment_dtype != "fp32"
    # On a CPU the states are in the host's memory as they are.
    offload = StreamCopies(buckets.device) if options.offload == "optimizer" and buckets.device.type == "cuda" else None
    result = ShardedOptimizer(buckets, rules, _DTYPES[options.moment_dtype] if narrow else None, offload)
    result.offload_is_idle = options.offload == "optimizer" and offload is None
    return result


def gradient_types(options: OptimizerOptions) -> GradientTypes:
    """Return the types of gradients that the options ask for."""
    main, wire = (
        None if name == "fp32" else _DTYPES[name] for name in (options.main_grad_dtype, options.grad_reduce_dtype)
    )
    return GradientTypes(main, wire)
