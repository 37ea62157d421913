"""The feedforward layer: module, reference ops, operators, dispatch, capacity, kernels.

Imports only `architecture` and `paths`, never what trains, stores or measures a model.
"""
