"""vLLM's Llama with FFNs on the sparse kernels: for exports of gated models with ReLU or ReLU².

Shapes: M tokens, K hidden_size, N intermediate_size. With tensor parallelism N is this rank's share
of the neurons.
"""

import copy
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

from sparsellm.ffn.activations import RECTIFIED, WITH_KERNELS
from sparsellm.ffn.inference_ops import sparse_ffn
from sparsellm.ffn.types import FFNWeights


class _AsLoaded(UnquantizedLinearMethod):
    """Leaves a weight as it is in the file; on CPUs vLLM would give it a layout of its own."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """vLLM calls this whenever it has loaded the weights."""


class _WithTransposed(_AsLoaded):
    """Also keeps the transposed weight, which the kernels read."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Adds ``down_NK`` to the layer."""
        layer.register_buffer("down_NK", layer.weight.detach().t().contiguous(), persistent=False)


class SparseMLP(nn.Module):
    """A gated FFN with the names of vLLM's own, which loads its weights by them.

    Raises:
        ValueError: no kernels compute such an FFN.
    """

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.activation = config.hidden_act
        if self.activation not in RECTIFIED:
            raise ValueError(f"hidden_act {self.activation} in config.json must be {WITH_KERNELS}")
        if getattr(config, "mlp_bias", False):
            raise ValueError("mlp_bias in config.json must be false")
        k, n = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            k, [n, n], bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(n, k, bias=False, prefix=f"{prefix}.down_proj")
        self.gate_up_proj.quant_method = _AsLoaded()
        self.down_proj.quant_method = _WithTransposed()

    def forward(self, x_MK: Tensor) -> Tensor:
        """(M, K) → (M, K)."""
        gate_NK, up_NK = self.gate_up_proj.weight.chunk(2)
        down = self.down_proj
        w = FFNWeights(
            gate_NK, up_NK, down.weight, activation=self.activation, down_NK=down.down_NK
        )
        y_MK = sparse_ffn(x_MK, w)
        return tensor_model_parallel_all_reduce(y_MK) if down.tp_size > 1 else y_MK


class SparseLlamaDecoderLayer(LlamaDecoderLayer):
    """vLLM's block with a `SparseMLP`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        if vllm_config.quant_config is not None:
            raise ValueError("the sparse kernels take bf16 and fp16 weights, not quantised ones")
        config = config or vllm_config.model_config.hf_config
        # vLLM's own FFN, which is replaced, refuses other activations than SiLU.
        silu = copy.copy(config)
        silu.hidden_act = "silu"
        super().__init__(vllm_config, prefix, config=silu)
        self.mlp = SparseMLP(config, f"{prefix}.mlp")


class SparseLlamaForCausalLM(LlamaForCausalLM):
    """The model class that `vllm_plugin.register` names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=SparseLlamaDecoderLayer)
