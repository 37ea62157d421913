"""The plugin that vLLM finds by the entry point ``vllm.general_plugins`` (pyproject.toml).

vllm serve exported --hf-overrides '{"architectures": ["SparseLlamaForCausalLM"]}'
"""

ARCHITECTURE = "SparseLlamaForCausalLM"


def register() -> None:
    """Makes the class known to vLLM, which calls this in each of its processes."""
    from vllm import ModelRegistry

    # By name, since vLLM must not touch a GPU before its processes have started.
    ModelRegistry.register_model(ARCHITECTURE, f"sparsellm.export.vllm_model:{ARCHITECTURE}")
