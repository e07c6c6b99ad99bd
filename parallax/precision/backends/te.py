"""NVIDIA's Transformer Engine: its quantisers and its matrix products (cuBLAS), in our layers.

Not its modules: a te.Linear keeps amax histories of its own, updates them once a micro-batch in the order in which backward
happens to run, and saves them as a pickle; with split backwards, as of zero-bubble and DualPipe, that order is wrong, and with
layers that stay in bf16 its autocast mixes up the reductions. Here scales, the ranks that agree on them, communication over tp,
what is put off for a later W, and checkpoints are ours, the same as for every backend; a product is added straight into the
fp32 main gradient. So delayed scaling is right under every schedule.

Importing it where there is no CUDA raises RuntimeError, OSError or FileNotFoundError, depending on what is missing: it is only
imported on a GPU. Everything is passed by keyword; tests/precision/test_transformer_engine.py holds the names against the
package's own source.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from parallax.precision.operands import BLOCK, COLUMN, ROW, Operand
from parallax.precision.recipe import Recipe
from parallax.precision.tiles import DTYPES, Tile

OLDEST = (2, 9)
ENUMERATORS = {"e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2"}
_GET_IT = "pip install --no-build-isolation 'transformer-engine[pytorch]', beside a CUDA build of torch"


def why_not(recipe: Recipe, device: torch.device) -> str | None:
    """Return what keeps Transformer Engine from running, None if nothing does; imports it only on a GPU."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, and this run is on {device.type}"
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        version = None
    spec = importlib.util.find_spec("transformer_engine")
    if version is None or spec is None or spec.origin is None:  # a folder of that name is found too, without an origin
        return f"needs Transformer Engine, which is not installed: {_GET_IT}"
    if _numbers(version) < OLDEST:
        return f"needs Transformer Engine {OLDEST[0]}.{OLDEST[1]} or later, not {version}"
    return _why_not_on(recipe, torch.cuda.get_device_capability(device), torch.version.cuda or "0") or _why_no_import()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _why_not_on(recipe: Recipe, capability: tuple[int, int], cuda: str) -> str | None:
    if recipe.scaling == "delayed":
        return None if capability >= (8, 9) else f"needs compute capability 8.9 or later, not {_dotted(capability)}"
    if recipe.fp8_format != "e4m3":
        return "computes tiles in e4m3 only; use --fp8-format e4m3"
    if capability < (9, 0) or _numbers(cuda) < (12, 9):
        return f"needs compute capability 9.0 and CUDA 12.9 or later for tiles, not {_dotted(capability)} and {cuda}"
    if capability >= (10, 0) and not recipe.power_of_two_scales:
        return "needs scales that are powers of two on this GPU; use --fp8-scales pow2"
    return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _why_no_import() -> str | None:
    try:
        _engine()
    except Exception as error:
        return f"cannot be imported ({type(error).__name__}: {error})"
    return None


@dataclass(frozen=True)
class _Engine:
    """What is used of the package."""

    tex: Any
    block_quantizer: Any
    tensor_quantizer: Any
    general_gemm: Any
    workspace: dict[str, Any]  # an argument of the products before 2.10 or so


@cache
def _engine() -> _Engine:
    import transformer_engine.pytorch  # noqa: F401  loads the libraries that the next one needs
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    workspace = {}
    if "workspace" in inspect.signature(general_gemm).parameters:
        from transformer_engine.pytorch.module.base import get_workspace

        workspace = {"workspace": get_workspace()}
    return _Engine(tex, Float8BlockQuantizer, Float8Quantizer, general_gemm, workspace)


@dataclass(frozen=True, eq=False)
class TeOperand(Operand):
    """An operand as Transformer Engine keeps it; `data` and `scale_inv` stand for its shape and type only.

    transposed: whether it is the transposed of what `tensor` holds.
    """

    tensor: Any = None
    transposed: bool = False

    def t(self) -> Operand:
        tile = None if self.tile is None else (self.tile[1], self.tile[0])
        return replace(self, data=self.data.t(), tile=tile, transposed=not self.transposed)

    def copies(self) -> list[torch.Tensor]:
        return [part for part in vars(self.tensor).values() if isinstance(part, torch.Tensor)]


class TransformerEngineBackend:
    """Transformer Engine's quantisers and general_gemm. Cuts inside of a tile are not for it: see `choose`."""

    name = "te"
    exact_sums = False

    def _operand(self, x: torch.Tensor, tensor: Any, tile: Tile | None, fp8_format: str) -> Operand:
        data = torch.empty((), dtype=DTYPES[fp8_format], device=x.device).expand(x.shape)  # a byte
        return TeOperand(data, torch.ones((), device=x.device), tile, tensor=tensor)

    def _by_tile(
        self, x: torch.Tensor, fp8_format: str, power_of_two: bool, dim: int, rows: bool, columns: bool
    ) -> Any:
        engine = _engine()
        quantizer = engine.block_quantizer(
            fp8_dtype=getattr(engine.tex.DType, ENUMERATORS[fp8_format]),
            rowwise=rows,
            columnwise=columns,
            amax_epsilon=0.0,
            force_pow_2_scales=power_of_two,
            block_scaling_dim=dim,
        )
        return quantizer(x.contiguous())

    def quantize(self, x: torch.Tensor, tile: Tile, fp8_format: str, power_of_two: bool) -> Operand:
        square = tile == BLOCK
        tensor = self._by_tile(
            x, fp8_format, power_of_two, 2 if square else 1, rows=tile != COLUMN, columns=tile != ROW
        )
        return self._operand(x, tensor, tile, fp8_format)

    def quantize_both(self, x: torch.Tensor, fp8_format: str, power_of_two: bool) -> tuple[Operand, Operand]:
        tensor = self._by_tile(x, fp8_format, power_of_two, 1, rows=True, columns=True)
        return self._operand(x, tensor, ROW, fp8_format), self._operand(x, tensor, COLUMN, fp8_format)

    def cast(self, x: torch.Tensor, scale: torch.Tensor, fp8_format: str) -> Operand:
        engine = _engine()
        quantizer = engine.tensor_quantizer(
            scale=scale.reshape(1),
            amax=torch.zeros(1, device=x.device),  # it measures too; the amax that counts is ours
            fp8_dtype=getattr(engine.tex.DType, ENUMERATORS[fp8_format]),
            rowwise=True,
            columnwise=True,
        )
        return self._operand(x, quantizer(x.contiguous()), None, fp8_format)

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
        if a.scale_inv is None:
            return (a.data @ b.data.to(a.data.dtype).t()).to(dtype)
        return self._gemm(a, b, out_dtype=dtype)

    def multiply_add_(self, total: torch.Tensor, a: Operand, b: Operand) -> None:
        if a.scale_inv is None or total.dtype != torch.float32:
            total.add_(self.multiply(a, b, torch.float32))
        else:
            self._gemm(a, b, out_dtype=torch.float32, out=total, accumulate=True)

    def _gemm(self, a: Operand, b: Operand, **how: Any) -> torch.Tensor:
        """Return a @ b^T. Its layouts are those of BLAS, columns first: what it calls A is our b."""
        assert isinstance(a, TeOperand) and isinstance(b, TeOperand)
        layout = {(False, False): "TN", (False, True): "NN", (True, True): "NT"}[a.transposed, b.transposed]
        engine = _engine()
        product = engine.general_gemm(
            A=b.tensor, B=a.tensor, layout=layout, use_split_accumulator=True, **how, **engine.workspace
        )
        return product[0]
