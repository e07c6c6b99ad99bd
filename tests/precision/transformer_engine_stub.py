"""Import the real Python source of Transformer Engine where there is no CUDA, with stand-ins for its C++ part; print what we use.

python transformer_engine_stub.py FOLDER        FOLDER: an unpacked transformer_engine wheel
"""

from __future__ import annotations

import importlib.machinery
import inspect
import json
import os
import sys
import types
import warnings
from unittest.mock import MagicMock


class _Enumeration(type):
    """A class of which every attribute is an int of its own."""

    known: dict[str, int] = {}  # noqa: RUF012

    def __getattr__(cls, name: str) -> object:
        if name == "__members__":  # pybind11's: {name: member} of those asked for so far
            return {
                full.split(".")[1]: n for full, n in _Enumeration.known.items() if full.startswith(f"{cls.__name__}.")
            }
        if name.startswith("__"):
            raise AttributeError(name)
        return _Enumeration.known.setdefault(f"{cls.__name__}.{name}", len(_Enumeration.known))


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Enumeration(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


def stand_in(name: str) -> None:
    module = _StandIn(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    sys.modules[name] = module


def parameters(function: object) -> dict[str, str]:
    """Return {name of a parameter: its kind}."""
    return {name: parameter.kind.name for name, parameter in inspect.signature(function).parameters.items()}


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch for importing without the libraries
    warnings.simplefilter("ignore")
    for name in ("transformer_engine_torch", "einops", "onnx", "onnxscript", "onnxscript.onnx_types"):
        stand_in(name)
    inspector = ("", ".api", ".logging", ".registry", ".utils", ".config_manager", ".base", ".debug_features")
    for part in (*inspector, ".debug_features.generic"):
        stand_in(f"nvdlfw_inspect{part}")
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda *_: None

    from transformer_engine.pytorch.module import base

    from parallax.precision.backends.te import _engine

    if hasattr(base, "get_workspace"):
        base.get_workspace = lambda: None  # it allocates on a GPU
    engine = _engine()
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        fp8_dtype=engine.tex.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        amax_epsilon=0.0,
        force_pow_2_scales=False,
        block_scaling_dim=1,
    )
    print(
        json.dumps(
            {
                "block": parameters(engine.block_quantizer.__init__),
                "tensor": parameters(engine.tensor_quantizer.__init__),
                "gemm": parameters(engine.general_gemm),
                "layouts": [
                    layout for layout in ("TN", "NN", "NT") if layout in inspect.getsource(engine.general_gemm)
                ],
                "callable": callable(quantizer),
                "held": [quantizer.force_pow_2_scales, quantizer.amax_epsilon, quantizer.block_len],
                "dim": quantizer.block_scaling_dim,
            }
        )
    )


main()
