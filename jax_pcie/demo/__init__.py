"""`python -m jax_pcie demo`: a real transformer with compressed tensor-parallel sums.

`cli` is the way in. It takes sentences (`corpus`), weights and tokens (`assets`), packs
them into rows (`packing`), holds the transformer (`model`) against NumPy (`reference`),
lets `measure` run it once per wire mode and `report` print what came out.
"""
