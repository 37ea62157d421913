"""The feedforward layer, a library that stands alone.

reference.py states every operation in plain torch. training_path/ has the module that trains,
inference_path/ makes finished models fast, kernels/ compiles and launches cuda/. What both paths
share is here: types, activations, formats, costs, dispatch between sparse and dense.
"""
